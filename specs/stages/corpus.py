"""The `corpus` stage: documents become filtered, shuffled, tokenised Megatron `.bin/.idx`; one part per
source."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import field_validator

from specs.base import Spec, execution, identity, option, reference
from specs.errors import FieldPath, Problem
from specs.filters import FilterSpec, a_column_for_each_score, columns_read
from specs.personal_data import PersonalDataField, Pii, replaced_kinds, replaced_only
from specs.planted import Buckets, Planted
from specs.sources import TOKENISED, SourceSpec
from specs.stages.base import SourcePart, Stage
from specs.units import ByteSize, Reference


class RepeatedProbes(Spec):
    """Memorisation probes: documents cut to `length` tokens and put into the training split a known number
    of times (report, appendix on memorisation). Bucket 0 holds sequences that are never trained on."""

    buckets: Buckets = identity(min_length=2, description="numbers of repetitions, 0 among them")
    per_bucket: int = identity(ge=1)
    length: int = identity(ge=8, description="tokens per sequence")


class CorpusSource(Spec):
    """The processing of one source."""

    filters: list[FilterSpec] = identity(default_factory=list, description="applied in this order")
    pii: PersonalDataField = identity(
        True,
        description="personal data to replace by fixed placeholders, after the filters; true: e-mail"
        " addresses, public IP addresses and IBANs; false (for code and mathematics): nothing; a list; or"
        " {kinds: [phone], only: {language: [deu]}}",
    )
    holdout: float = identity(
        0.02,
        ge=0,
        lt=1,
        description="share of the documents kept out of training, for validation; 0 holds out none",
    )
    repeats: RepeatedProbes | None = option(None)
    planted: dict[str, Planted] = option(
        default_factory=dict,
        description="canaries and poison by name: documents to put among those of this source, a known number"
        " of times each",
    )
    examples: bool = option(
        True,
        description="whether to store a few kept and dropped documents, unchanged, for `apertus inspect`;"
        " set false if they must not be stored",
    )

    @field_validator("filters")
    @classmethod
    def _of_documents(cls, filters: list[FilterSpec]) -> list[FilterSpec]:
        for step in filters:
            if step.of != "conversation":
                raise ValueError(f"a document has no {step.of}; leave out `of` of {step.filter}")
        return a_column_for_each_score(filters)

    @property
    def replaced(self) -> tuple[Pii, ...]:
        return replaced_kinds(self.pii)

    @property
    def replaced_only(self) -> dict[str, list[str]]:
        return replaced_only(self.pii)

    def columns(self) -> list[str]:
        """The columns of a row, besides the text, that the processing reads."""
        return columns_read(self.filters, self.replaced_only)


ON_TOKENS = ("holdout", "repeats", "planted", "examples")


def needs_text(process: CorpusSource) -> list[str]:
    """The names of the fields whose values need text, and so cannot be used with a source of tokens."""
    fields = CorpusSource.model_fields.items()
    changed = [
        name
        for name, field in fields
        if getattr(process, name) != field.get_default(call_default_factory=True)
    ]
    return [name for name in changed if name not in (*ON_TOKENS, "pii")] + (["pii"] if process.pii else [])


MEMORY = execution(
    ByteSize(4 * 2**30),
    description="what a worker holds of its documents, beside the 0.5 GiB of its program, whatever the"
    " corpus; with less, reads and writes are shorter",
)
SHARD_TOKENS = option(2**31, ge=1, description="of a file of tokens, on average; the order depends on it")


class CorpusStage(Stage):
    """Filtered, deduplicated, shuffled and tokenised documents."""

    VERSION: ClassVar[int] = 6
    PART_PER_SOURCE: ClassVar[bool] = True
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

    def source_fields(self) -> dict[str, FieldPath]:
        return {source: ("sources", source) for source in self.sources}

    def source_problems(self, name: str, source: SourceSpec, at: FieldPath) -> Iterator[Problem]:
        if source.declared is not None and source.declared.tokens is None:
            message = f"source '{name}' declares no tokens; the plan of a corpus needs their number"
            yield Problem(("sources", name, "declared"), message, "set declared.tokens.")
        elif source.format in TOKENISED and (fields := needs_text(self.sources[name])):
            message = f"source '{name}' is already tokenised; {', '.join(fields)} would need its text"
            fix = "set pii: false, and no other step; apply them before the source is tokenised."
            yield Problem((*at, fields[0]), message, fix)


class CorpusPart(SourcePart):
    """The resolved part of one source. Further inputs are `filter:<step>:<file>` for the files that filters
    read, `scores:<step>` for the scores of a model, and `planted:<name>` for the texts that are planted."""

    PLAN_DEPENDS: ClassVar[bool] = True
    process: CorpusSource = identity()
    planted: dict[str, SourceSpec] = option(
        default_factory=dict, description="sources of the texts that are planted, by name"
    )
    memory: ByteSize = MEMORY
    shard_tokens: int = SHARD_TOKENS
