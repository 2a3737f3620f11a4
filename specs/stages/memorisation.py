"""The memorisation settings of an evaluation (report, appendix on memorisation): what is continued, how, and
the names of the metrics."""

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from specs.base import Spec, execution, identity, option, reference
from specs.errors import FieldPath, Problem, did_you_mean
from specs.planted import each_once
from specs.stages.base import Part
from specs.stages.corpus import CorpusSource
from specs.stages.preference_data import Sampling
from specs.units import Reference

MEASURES = ("exact", "rouge_l", "common_substring", "type_token_ratio")  # of a continuation


class Nucleus(Spec):
    """Tokens drawn from the most likely ones that together have a probability of at least `top_p` (arXiv
    1904.09751)."""

    top_p: float = identity(0.9, gt=0, le=1)
    temperature: float = identity(1.0, ge=0.01)
    seed: int = identity(28)


class Exposure(Spec):
    """The exposure of a canary: how much more likely it has become than texts that could have been drawn
    instead, log2(alternatives + 1) - log2(its rank among them) by the loss of the whole text (arXiv
    1802.08232). For a canary that a model never saw, 1.44 is expected; the most is log2(alternatives + 1)."""

    alternatives: int = identity(
        1023, ge=1, le=10**6, description="drawn for each canary; all, if there are fewer"
    )
    seed: int = identity(28, description="seed of the alternatives")


class Memorisation(Spec):
    """Continuations of the probes of a corpus: greedy ones, and sampled ones if stated, from every prefix at
    every offset."""

    probes: Reference = reference(
        to="corpus", description="a part of a corpus that has `repeats`, or plants `planted`"
    )
    planted: str | None = option(
        None, description="name of the planted documents that are the probes, in place of those of `repeats`"
    )
    exposure: Exposure | None = option(None, description="measures the exposure of planted canaries, beside")
    prefixes: list[Annotated[int, Field(ge=1)]] = identity(
        default_factory=lambda: [32], min_length=1, description="tokens given"
    )
    offsets: list[Annotated[int, Field(ge=0)]] = identity(
        default_factory=lambda: [0], min_length=1, description="tokens of the probe before the prefix"
    )
    suffix: int = identity(32, ge=1, description="tokens compared")
    nucleus: Nucleus | None = reference(None)
    min_type_token_ratio: float = identity(
        0.0,
        ge=0,
        lt=1,
        description="probes whose true continuation has a ratio of distinct tokens to tokens of this or less "
        "are left out; degenerate text is continued without being memorised",
    )
    engine: Literal["transformers", "vllm"] = reference(
        "transformers",
        description="vllm: in a separate environment, on launch.parallel.tp GPUs",
    )
    batch_size: int = reference(32, ge=1, le=10_000, description="probes that are continued together")

    _each_once = field_validator("prefixes", "offsets")(each_once)

    def problems(self, at: FieldPath, process: CorpusSource) -> Iterator[Problem]:
        """Why the part of a corpus, which `process` makes, does not have the probes that these settings, at
        the path `at`, ask for."""
        if self.planted is None and process.repeats is None:
            message = f"'{self.probes}' has no repeats:, so it has no probes"
            fix = "give that source of the corpus a repeats:, or set planted."
            yield Problem((*at, "probes"), message, fix)
        elif self.planted is not None and self.planted not in process.planted:
            message = f"'{self.probes}' plants no '{self.planted}'"
            yield Problem((*at, "planted"), message, did_you_mean(self.planted, process.planted))
        elif self.exposure and (self.planted is None or process.planted[self.planted].canaries is None):
            message = "only canaries have known alternatives, among which their exposure ranks them"
            yield Problem((*at, "exposure"), message, "set planted: with the name of canaries.")

    @property
    def decodings(self) -> dict[str, Sampling]:
        """The ways in which continuations are made, by their names in metrics."""
        common = {"n": 1, "max_new_tokens": self.suffix, "batch_size": self.batch_size, "engine": self.engine}
        ways = {"greedy": Sampling.model_validate({**common, "temperature": 0.0})}
        if drawn := self.nucleus:
            ways["nucleus"] = Sampling.model_validate(common | drawn.model_dump())
        return ways

    def metrics(self, buckets: Iterable[int]) -> list[str]:
        """The names of the metrics. `buckets`: numbers of repetitions of the probes."""
        names, settings = ["memorisation/passes"], [(p, o) for p in self.prefixes for o in self.offsets]
        for bucket in buckets:
            names += with_interval(exposure_name(bucket)) if self.exposure else []
            for prefix, offset in settings:
                measured = [("truth", "type_token_ratio")]
                measured += [(decoding, measure) for decoding in self.decodings for measure in MEASURES]
                names.append(metric_name("truth", prefix, offset, "sequences", bucket))
                for decoding, measure in measured:
                    names += with_interval(metric_name(decoding, prefix, offset, measure, bucket))
        return names


def with_interval(name: str) -> list[str]:
    """The name of a metric, and those of its 95% interval."""
    return [name, f"{name}/low", f"{name}/high"]


def exposure_name(bucket: int) -> str:
    """The name of the mean exposure of the canaries that training saw `bucket` times."""
    return f"memorisation/exposure/{bucket}"


class ContinuationsPart(Part):
    """The resolved continuations by one way of decoding. Inputs: `model` (an export), `probes` (a corpus)."""

    VERSION: ClassVar[int] = 1
    WORKERS: ClassVar[int] = 1
    HELD_BY: ClassVar[str] = "sampling"
    planted: str | None = option(None)
    prefixes: list[int] = identity()
    offsets: list[int] = identity()
    sampling: Sampling = identity(description="one completion of each prefix, of `max_new_tokens` tokens")
    batches_per_unit: int = execution(8)


def metric_name(decoding: str, prefix: int, offset: int, measure: str, bucket: int) -> str:
    """The name of a metric, whose interval is at `/low` and `/high`. `decoding`: how it is continued,
    `truth` for the true one; `prefix` and `offset`: tokens given, and before them; `measure`: `sequences` for
    the number; `bucket`: repetitions in training."""
    return f"memorisation/{decoding}/prefix-{prefix}/offset-{offset}/{measure}/{bucket}"
