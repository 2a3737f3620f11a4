"""The `corpus` stage: documents become filtered, shuffled, tokenised Megatron `.bin/.idx`; one part per source."""

from __future__ import annotations

from typing import ClassVar, Literal

from specs.base import Spec, execution, identity, reference
from specs.sources import FilterSpec, SourceSpec
from specs.stages.base import Stage
from specs.units import Reference


class Repeats(Spec):
    """Memorisation probes: documents cut to `length` tokens and put into the training split a known number of times (report, appendix on
    memorisation). Bucket 0 holds sequences that are never trained on."""

    buckets: list[int] = identity(min_length=2, description="numbers of repetitions, 0 among them")
    per_bucket: int = identity(ge=1)
    length: int = identity(ge=8, description="tokens per sequence")


class CorpusSource(Spec):
    """How one source is processed."""

    filters: list[FilterSpec] = identity(default_factory=list)
    pii: bool = identity(True, description="replace e-mail and IP addresses by fixed placeholders; switch off for code")
    holdout: float = identity(0.02, gt=0, lt=1, description="share of the documents kept out of training, for validation")
    repeats: Repeats | None = identity(None, neutral=None)


ON_TOKENS = ("holdout", "repeats")


def needs_text(process: CorpusSource) -> list[str]:
    """Names of the fields that ask for something which can be done to text only, so not to a source of tokens."""
    fields = CorpusSource.model_fields.items()
    changed = [name for name, field in fields if getattr(process, name) != field.get_default(call_default_factory=True)]
    return [name for name in changed if name not in (*ON_TOKENS, "pii")] + (["pii"] if process.pii else [])


class CorpusStage(Stage):
    """`sources` maps names of the pipeline's `sources:` to how each is processed."""

    VERSION: ClassVar[int] = 1
    kind: Literal["corpus"] = identity()
    tokenizer: Reference = reference()
    sources: dict[str, CorpusSource] = reference(min_length=1)
    seed: int = identity(28)
    files_per_task: int = execution(200, ge=1, description="input files per restartable task")


class CorpusPart(Spec):
    """Resolved, for one source. Inputs: `tokenizer`, `documents`."""

    source: SourceSpec = identity()
    process: CorpusSource = identity(default_factory=CorpusSource)
    seed: int = identity()
    files_per_task: int = execution(200)
    listing: list[str] = execution(default_factory=list, description="the files, relative to the url, sorted; the planner fills it in")
