"""What the JSON files of a store state, field by field.

They are the store's data, written by who knows whom: what reads one checks it here before anything is done with it.
Fields that differ from kind to kind (most metrics and facts, the resolved spec) are left as they are.

Invariant: a file that passes has every field that is named here, of the type that is named here.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from infra.store.records import DamagedError, StoreError, check_files, check_record, inside, one_name
from specs.foreign import Foreign, ForeignError, M, checked

Count = Annotated[int, Field(ge=0, le=2**63)]
Step = Count | None
Document = dict[str, Any]
FIX = "`apertus verify --all --fix` withdraws it, so that it is made again"


class Format(Foreign):
    """`format.json`."""

    format: Count
    migrating_from: Count | None = None  # while release 0.1.0 migrates the store


class Input(Foreign):
    """What an artifact was made from: another artifact, or (kind `external`) documents outside the store."""

    kind: str
    fingerprint: str
    name: str = ""
    path: str | None = None
    step: Step = None


class Hashed(Foreign):
    """What is read of the spec of an artifact, which differs from kind to kind."""

    start_step: Count = 0
    start_tokens: Count = 0
    global_batch_size: Count = 0
    sequence_length: Count = 0


class Identity(Foreign):
    """`identity.json`."""

    kind: str
    version: Count
    fingerprint: str
    name: str
    spec: Hashed
    inputs: dict[str, Input]


class Split(Foreign):
    tokens: Count = 0
    documents: Count = 0
    conversations: Count = 0


class Metrics(Foreign):
    """What a plan or a report computes with."""

    tokens: Count = 0
    documents: Count = 0
    rows: Count = 0
    chosen: Count = 0
    tokens_per_second: float = 0.0
    train: Split = Split()


class Facts(Foreign):
    """What is read of a checkpoint by others than the program that trains on."""

    validation: dict[str, float] | None = None
    validation_step: Step = None
    passes: dict[str, float] | None = None


class Seconds(Foreign):
    startup: float
    compute: float
    storage: float


class Execution(Foreign):
    launch: Document = Field(default_factory=dict)
    spec: Document = Field(default_factory=dict)


class Marker(Foreign):
    """What every commit marker has. Of a unit, nothing more."""

    attempt: str
    files: Document
    attempts: list[str] = Field(default_factory=list)
    history: list[Document] = Field(default_factory=list)


class CheckpointMarker(Marker):
    """`checkpoints/<step>.json`."""

    step: Count
    folder: str
    facts: Facts
    seconds: Seconds
    created: str = ""


class Manifest(Marker):
    """`manifest.json`, `manifest-<step>.json`."""

    metrics: Metrics
    facts: Document
    seconds: Seconds | None = None
    execution: Execution = Execution()
    versions: dict[str, str] = Field(default_factory=dict)
    created: str = ""


class Part(Foreign):
    path: str
    step: Step = None


class Run(Foreign):
    """`runs/<pipeline>/<time>.json`."""

    parts: dict[str, Part]
    spec: Document | None = None


class Lock(Foreign):
    """`inputs/<key>.json`."""

    digest: str


class Reference(Foreign):
    """`references/<step>-<id>.json`."""

    referrer: str


def check(model: type[M], document: Any, what: str) -> M:
    """DamagedError, which names the fields that are wrong, for a document that is none of that model."""
    try:
        return checked(model, document)
    except ForeignError as error:
        raise DamagedError(f"{what} is damaged: {error}; {FIX}") from error


def check_marker(marker: Any, what: str, model: type[Marker] = Marker) -> Document:
    """A manifest, checkpoint marker or unit whose names and records are what they should be. StoreError for anything
    else."""
    check(model, marker, what)
    one_name(marker["attempt"], what)
    check_files(marker["files"], what)
    for entry in marker.get("history", []):
        check_record(entry, f"{what}, its history,")
        inside(entry.get("path"), what)
    return dict(marker)


def check_unit(unit: Any, path: str, what: str) -> Document:
    """A unit of the artifact in `path`: each file states where it lies, which is below the artifact's attempts."""
    marker = check_marker(unit, what)
    for name, record in marker["files"].items():
        if not inside(record.get("path"), what).startswith(f"{path}/attempts/"):
            raise StoreError(f"{what} names '{record['path']}' as its file '{name}': that is not a path inside the artifact {path}")
    return marker
