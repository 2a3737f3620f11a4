"""Defines a model for each JSON document of a store, through which the document is written and read.

Documents are data of the store, whose writer is unknown: every reader checks a document here before anything
is done with it. What differs from kind to kind (metrics, facts, the resolved spec) stays a dictionary, of
which the fields that others compute with are checked.

A document is stored with a checksum of its own content (`sealed`), which is compared each time it is read
(`unsealed`): `Store.write_document` and `Store.read_document` do this, and `infra.store.inputs` for each line
of a list of files. Documents of other programs may have none: they are read, and named by plans and
`apertus verify`. Two kinds never have one: `format.json`, of which one content is accepted, and the files of
a lease, on which no data depend (`infra.store.writing.lease`).

Invariants: a document that passes has every field that is named here, of the type that is named here. It is
written with the fields that were stated, its checksum, and with no others.
"""

import hashlib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from infra.store.records import (
    FIX,
    DamagedError,
    FileRecord,
    LocatedRecord,
    SingleName,
    StoreError,
    StorePath,
)
from specs.base import canonical_json, fingerprint, hashed_input
from specs.foreign import Foreign, ForeignError, M, checked

Count = Annotated[int, Field(ge=0, le=2**63)]
Step = Count | None
Document = dict[str, Any]
CHECKSUM = "checksum"
Outcome = Literal["finished", "failed", "interrupted"]


class _With:
    """An annotation of a dictionary that is kept as it is, after the fields of `model` in it were checked."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def keep(value: Any, check: core_schema.ValidatorFunctionWrapHandler) -> Any:
            check(value)
            return value

        as_it_is = core_schema.plain_serializer_function_ser_schema(lambda value: value)
        return core_schema.no_info_wrap_validator_function(
            keep, handler.generate_schema(self._model), serialization=as_it_is
        )


class Format(Foreign):
    """`format.json`."""

    format: Count


class InputRecord(Foreign):
    """An input that an artifact was made from."""

    kind: str  # the kind of the artifact; `external`: documents outside the store
    fingerprint: str
    name: str = ""
    path: str | None = None
    step: Step = None
    checkpoint: str | None = None

    @property
    def hashed(self) -> str:
        """The form of the input in the fingerprint of the artifact that was made from it."""
        return hashed_input(self.fingerprint, self.step)

    @property
    def place(self) -> str | None:
        """The folder of the artifact in the store; None for documents outside it."""
        return None if self.kind == "external" else self.path or f"{self.kind}/{self.fingerprint}"


class HashedFields(Foreign):
    """The fields that are read from the spec of an artifact, which differs from kind to kind."""

    start_step: Count = 0
    start_tokens: Count = 0
    global_batch_size: Count = 0
    sequence_length: Count = 0


class Identity(Foreign):
    """`identity.json`: what was hashed into the fingerprint."""

    kind: str
    version: Count
    fingerprint: str
    name: str
    spec: Annotated[Document, _With(HashedFields)]
    inputs: dict[str, InputRecord]  # by role

    @property
    def computed_fingerprint(self) -> str:
        """The fingerprint of what the document states, which is the name of the artifact's folder."""
        inputs = {role: ref.hashed for role, ref in self.inputs.items()}
        return fingerprint(self.kind, self.version, self.spec, inputs)


class Split(Foreign):
    tokens: Count = 0
    documents: Count = 0
    conversations: Count = 0


class Metrics(Foreign):
    """The metrics that a plan or a report computes with."""

    tokens: Count = 0
    documents: Count = 0
    rows: Count = 0
    chosen: Count = 0
    tokens_per_second: float = 0.0
    train: Split = Field(default_factory=Split)


class CheckpointFacts(Foreign):
    """The facts of a checkpoint that are read by programs other than the one that continues training."""

    validation: dict[str, float] | None = None
    validation_step: Step = None
    passes: dict[str, float] | None = None


class Seconds(Foreign):
    """The time that a part took, over the attempts that it continues."""

    startup: float
    compute: float
    storage: float


class Execution(Foreign):
    """How a part was run: what does not enter its fingerprint."""

    launch: Document = Field(default_factory=dict)
    spec: Document = Field(default_factory=dict)


class Unit(Foreign):
    """`units/<key>.json`."""

    attempt: SingleName
    files: dict[StorePath, LocatedRecord]
    data: Any = None


class CheckpointMarker(Foreign):
    """`checkpoints/<step>.json`."""

    step: Count
    attempt: SingleName
    attempts: list[str] = Field(default_factory=list)  # those that led to the checkpoint, with this one
    folder: StorePath  # in the attempt
    files: dict[StorePath, FileRecord]  # by name in that folder
    facts: Annotated[Document, _With(CheckpointFacts)]
    history: list[LocatedRecord] = Field(default_factory=list)  # rows of metrics, below `attempts/`
    seconds: Seconds
    created: str = ""


class Manifest(Foreign):
    """`manifest.json`, `manifest-<step>.json`. It repeats what `identity.json` says, for people."""

    kind: str = ""
    version: Count = 0
    fingerprint: str = ""
    name: str = ""
    spec: Document = Field(default_factory=dict)
    inputs: dict[str, InputRecord] = Field(default_factory=dict)
    attempt: SingleName
    files: dict[StorePath, LocatedRecord | FileRecord]  # by name in the attempt; a unit's states its place
    metrics: Annotated[Document, _With(Metrics)]
    facts: Document
    seconds: Seconds | None = None
    execution: Execution = Field(default_factory=Execution)
    versions: dict[str, str] = Field(default_factory=dict)  # of Python and the libraries
    created: str = ""
    # At the end of a training segment
    step: Step = None
    checkpoint: str | None = None  # its folder in the store
    history: list[LocatedRecord] = Field(default_factory=list)

    def place(self, artifact: str, name: str) -> str:
        """The place in the store of a file of the manifest. StoreError for a place outside the artifact."""
        record = self.files[name]
        if not isinstance(record, LocatedRecord):
            return f"{artifact}/attempts/{self.attempt}/{name}"
        return inside_artifact(record, artifact, f"the manifest of {artifact}", name)


Ended = TypeVar("Ended", CheckpointMarker, Manifest)


class MetricsRow(Foreign):
    """A row of the history of training; other values that are measured at a step have fields of their own."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    step: Count
    tokens: Count | None = None  # consumed by the stage up to this step
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    validation: dict[str, float] | None = None  # held-out loss by source
    norms: dict[str, float] | None = None  # of weights and optimizer states, by kind and layer
    checkpoint: dict[str, float] | None = None  # the cost of committing a checkpoint
    anomaly: Document | None = None


class RunPart(Foreign):
    path: str
    step: Step = None


class RunEnd(Foreign):
    outcome: Outcome
    reason: str = ""  # the parts that did not finish, one a line
    unfinished: list[str] = Field(default_factory=list)  # their names; an older run may have finished them
    started: str
    seconds: float


class RunDocument(Foreign):
    """`runs/<pipeline>/<time>.json`."""

    parts: dict[str, RunPart]
    spec: Document | None = None  # the recipe as resolved
    end: RunEnd | None = None  # only in the record that a run writes when it ends


class Protected(Foreign):
    """`protected/<kind>-<fingerprint>[-<step>].json`."""

    name: str
    path: str
    step: Step


class Lock(Foreign):
    """`inputs/<key>.json`: the digest of documents outside the store, by their listing."""

    digest: str
    url: str = ""
    bytes: Count = 0
    files: Count = 0


class InputFile(Foreign):
    """A line of `inputs/<digest>.files.jsonl`."""

    path: str
    size: int
    sha256: str


class CheckpointUse(Foreign):
    """`references/<step>-<id>.json`: who starts from a checkpoint."""

    referrer: str


def check(model: type[M], document: Any, what: str) -> M:
    """Reads a document as a model. DamagedError, which names the wrong fields, when it does not fit."""
    try:
        return checked(model, document)
    except ForeignError as error:
        raise DamagedError(f"{what} is damaged: {error}; {FIX}") from error


def check_step(model: type[Ended], document: Any, step: int | None, what: str) -> Ended:
    """The marker of a checkpoint at a step, or the manifest, checked; `step` is None for most manifests."""
    marker = check(model, document, what)
    if marker.step != step:
        raise DamagedError(f"{what} is damaged: it states step {marker.step}; {FIX}")
    return marker


def check_unit(document: Any, path: str, what: str) -> Unit:
    """A unit of the artifact at `path`, checked: its files are below the artifact's attempts."""
    unit = check(Unit, document, what)
    for name, record in unit.files.items():
        inside_artifact(record, path, what, name)
    return unit


def inside_artifact(record: LocatedRecord, artifact: str, what: str, name: str) -> str:
    """The place of a file that a document (`what`) names. StoreError for a place outside the artifact."""
    if not record.path.startswith(f"{artifact}/attempts/"):
        outside = f"that is not a path inside the artifact {artifact}"
        raise StoreError(f"{what} names '{record.path}' as its file '{name}': {outside}")
    return record.path


def to_json(document: Any) -> bytes:
    """The bytes that a document is stored as."""
    if isinstance(document, BaseModel):
        document = document.model_dump(exclude_unset=True)
    return (json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def sealed(document: Document) -> Document:
    """A document, of JSON values only, with its checksum: the SHA-256 of the canonical JSON of the rest."""
    return document | {CHECKSUM: hashlib.sha256(canonical_json(document).encode()).hexdigest()}


def unsealed(document: Any) -> tuple[Any, bool]:
    """A document without its checksum, and whether it had one. ForeignError if the checksum differs."""
    if not isinstance(document, dict) or CHECKSUM not in document:
        return document, False
    content = {name: value for name, value in document.items() if name != CHECKSUM}
    if sealed(content)[CHECKSUM] != document[CHECKSUM]:
        raise ForeignError("its content does not match its checksum, so it was changed after it was written")
    return content, True


def with_checksum(data: bytes) -> bytes:
    """The bytes that a document is stored as, from those of the document without its checksum."""
    return to_json(sealed(json.loads(data)))
