"""The `corpus` stage: documents become filtered, shuffled, tokenised Megatron `.bin/.idx`; one part per
source."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, field_validator

from specs.base import Spec, execution, identity, reference
from specs.filters import LANGUAGE_COLUMNS, FilterSpec, LanguageFilter
from specs.stages.base import SourcePart, Stage
from specs.units import ByteSize, Reference


class Repeats(Spec):
    """Memorisation probes: documents cut to `length` tokens and put into the training split a known number
    of times (report, appendix on memorisation). Bucket 0 holds sequences that are never trained on."""

    buckets: list[Annotated[int, Field(ge=0)]] = identity(
        min_length=2, description="numbers of repetitions, 0 among them"
    )
    per_bucket: int = identity(ge=1)
    length: int = identity(ge=8, description="tokens per sequence")

    @field_validator("buckets")
    @classmethod
    def _each_once(cls, buckets: list[int]) -> list[int]:
        if twice := sorted({bucket for bucket in buckets if buckets.count(bucket) > 1}):
            raise ValueError(f"{twice[0]} is repeated; state it once, and raise per_bucket for more probes")
        return buckets


Pii = Literal["email", "ip", "iban", "phone"]


class CorpusSource(Spec):
    """How one source is processed."""

    filters: list[FilterSpec] = identity(default_factory=list, description="applied in this order")
    pii: bool | list[Pii] = identity(
        True,
        description=(
            "personal data to replace by fixed placeholders, after the filters; true: e-mail "
            "addresses, public IP addresses and IBANs; false (for code and mathematics): nothing; or a list"
        ),
    )
    holdout: float = identity(
        0.02, gt=0, lt=1, description="share of the documents kept out of training, for validation"
    )
    repeats: Repeats | None = identity(None, neutral=None)
    examples: bool = identity(
        True,
        neutral=True,
        description=(
            "whether to store a few kept and dropped documents, unchanged, for `apertus inspect`; state false"
            " if they must not be stored"
        ),
    )

    @property
    def replaced(self) -> tuple[Pii, ...]:
        """Kinds of personal data that are replaced, in the order of replacement."""
        chosen = ("email", "ip", "iban") if self.pii is True else self.pii or ()
        return tuple(kind for kind in get_args(Pii) if kind in chosen)

    def columns(self) -> list[str]:
        """Columns of a row, beside the text, that the filters read; sorted, without those that an earlier
        filter adds."""
        needed: set[str] = set()
        made: set[str] = set()
        for step in self.filters:
            needed |= set(step.columns()) - made
            made |= set(LANGUAGE_COLUMNS) if isinstance(step, LanguageFilter) else set()
        return sorted(needed)


ON_TOKENS = ("holdout", "repeats", "examples")


def needs_text(process: CorpusSource) -> list[str]:
    """Names of the fields whose values need text, and so cannot be used with a source of tokens."""
    fields = CorpusSource.model_fields.items()
    changed = [
        name
        for name, field in fields
        if getattr(process, name) != field.get_default(call_default_factory=True)
    ]
    return [name for name in changed if name not in (*ON_TOKENS, "pii")] + (["pii"] if process.pii else [])


MEMORY = execution(
    ByteSize(4 * 2**30),
    description=(
        "what a worker holds of its documents, beside the 0.5 GiB of its program, whatever the corpus; with"
        " less, reads and writes are shorter"
    ),
)
SHARD_TOKENS = identity(
    2**31, neutral=2**31, ge=1, description="of a file of tokens, on average; the order depends on it"
)


class CorpusStage(Stage):
    """Filtered, deduplicated, shuffled and tokenised documents."""

    VERSION: ClassVar[int] = 3
    kind: Literal["corpus"] = identity()
    tokenizer: Reference = reference(to="tokenizer")
    sources: dict[str, CorpusSource] = reference(
        min_length=1,
        description="names of the pipeline's `sources:`, and how each is processed",
    )
    seed: int = identity(28)
    files_per_task: int = execution(200, ge=1, description="input files per restartable task")
    memory: ByteSize = MEMORY
    shard_tokens: int = SHARD_TOKENS


class CorpusPart(SourcePart):
    """Resolved, for one source. A further input is `filter:<step>:<file>` for the files that filters
    read."""

    PLAN_DEPENDS: ClassVar[bool] = True
    process: CorpusSource = identity()
    memory: ByteSize = MEMORY
    shard_tokens: int = SHARD_TOKENS
