"""The `evaluate` stage: held-out perplexity per source, verbatim continuation of repeated sequences, gates on
any metric, and published scores beside the metrics."""

from collections.abc import Collection, Container, Iterable, Iterator
from typing import ClassVar, Literal

from specs.base import Spec, execution, identity, option, reference
from specs.errors import FieldPath, Problem
from specs.model import ModelSpec
from specs.planted import Canaries
from specs.rewards import RewardSpec
from specs.stages.base import FromCheckpoint, Part, Stage
from specs.stages.corpus import CorpusStage
from specs.stages.gates import Measuring
from specs.stages.harness import Harness
from specs.stages.memorisation import Memorisation
from specs.stages.preference_data import Sampling
from specs.units import Reference

SUITE = "harness:"
"""The prefix of the role of a suite of tasks among the inputs of an evaluation."""
CONTINUATIONS = "continuations:"
"""The prefix of the role of the continuations of probes by one way of decoding."""


class ByPosition(Spec):
    """The loss by position in the document, on held-out documents of `sources`, in buckets of equal width up
    to `sequence_length`."""

    sequence_length: int = identity(ge=16)
    buckets: int = identity(8, ge=1)
    samples: int = identity(64, ge=1, description="maximum number of held-out sequences per source")

    def conflicts(self) -> Iterator[str]:
        if self.buckets > self.sequence_length:
            most = self.sequence_length
            yield f"{self.buckets} buckets exceed {most} positions; set at most {most} buckets"

    @property
    def edges(self) -> list[int]:
        """Edges of the buckets, as equal as whole numbers allow: (1024, 4) -> [0, 256, 512, 768, 1024]."""
        return [index * self.sequence_length // self.buckets for index in range(self.buckets + 1)]


class Generation(Spec):
    """Answers to held-out prompts, sampled from the exported model or from any model's folder; their rewards;
    their divergence from `against`."""

    prompts: Reference = reference(to="conversations", description="a part, whose held-out split is used")
    limit: int = reference(200, ge=1, description="maximum number of prompts")
    sampling: Sampling = reference()
    reward: RewardSpec | None = reference(None)
    shown: int = identity(8, ge=0, description="prompts whose answers are stored for people to read")


class EvaluateStage(FromCheckpoint, Measuring):
    """Measures a model, alone or against another."""

    VERSION: ClassVar[int] = 2
    IN_LAYOUT: ClassVar[bool] = True
    kind: Literal["evaluate"] = identity()
    sources: list[Reference] = reference(
        default_factory=list,
        to=("corpus", "conversations"),
        description="parts of corpora, or of conversations, whose held-out split is scored; in conversations,"
        " the tokens of the answers",
    )
    samples: int = identity(64, ge=1, description="maximum number of held-out sequences per source")
    sequence_length: int | None = identity(
        None,
        ge=8,
        description="length of the held-out sequences; by default that of `against`, or the model's",
    )
    by_position: ByPosition | None = identity(None)
    memorisation: Memorisation | None = reference(None)
    generation: Generation | None = reference(None)
    harness: Harness | None = reference(None)
    against: Reference | None = reference(
        None,
        to="evaluate",
        description="evaluation of another model, to compare with: forgetting per source, paired rewards "
        "for the same prompts and seeds, divergence",
    )

    def part_problems(self, at: FieldPath, part: Reference, of: Stage) -> Iterator[Problem]:
        if self.memorisation is not None and at[-1] == "probes" and isinstance(of, CorpusStage):
            yield from self.memorisation.problems(at[:-1], of.sources[part.part or next(iter(of.sources))])

    def conflicts(self) -> Iterator[str]:
        if not (self.sources or self.memorisation or self.generation or self.harness):
            yield "the stage measures nothing; set sources, memorisation, generation or harness"
        if self.by_position and not self.sources:
            yield "by_position needs sources"


class EvaluatePart(Part):
    """The resolved evaluation. Inputs: `checkpoint`, `tokenizer`, but not for an architecture other than
    Apertus; `source:<i>`; `probes` and `continuations:<decoding>` for memorisation; `prompts`, `completions`
    and `rewards` for generation; `harness:<suite>`; `against`, `against_checkpoint`, and, where the same
    prompts were answered, `against_completions` and `against_rewards`."""

    ON_ENGINE: ClassVar[bool] = True

    model: ModelSpec | None = identity(description="None: of another architecture, which only answers")
    sequence_length: int = identity()
    samples: int = identity()
    by_position: ByPosition | None = option(None)
    memorisation: Memorisation | None = option(None)
    canaries: Canaries | None = option(None, description="canaries whose exposure is measured")
    shown: int = option(0, description="for generation: number of prompts whose answers are stored")
    answers: int = option(0, description="for generation: number of answers to a prompt that are computed")
    against_model: ModelSpec | None = option(None)
    source_names: list[str] = execution(description="names of the sources, for the metrics")
    name: str = execution("", description="name of the model, for people")
    against_name: str = execution("", description="name of the model of `against`, for people")
    attention: str = execution("auto")
    batch_size: int = execution(8)

    def metrics(self, roles: Container[str], buckets: Iterable[int], against: Collection[str]) -> list[str]:
        """The names of all metrics but those of the harness, by the roles of the inputs, the numbers of
        repetitions of the probes, and the sources of the evaluation that this one is compared with. The
        measurement leaves out positions of `by_position` that no held-out document reaches."""
        names = [
            *(["perplexity"] if self.source_names else []),
            *(f"perplexity/{source}" for source in self.source_names),
        ]
        if both := [source for source in self.source_names if source in against]:
            names += ["forgetting"] if set(against) == set(self.source_names) else []
            names += [f"forgetting/{source}" for source in both]
        if self.by_position:
            names += [f"loss/position/{edge}" for edge in self.by_position.edges[:-1]]
        if self.memorisation:
            names += self.memorisation.metrics(buckets)
        if "completions" in roles:
            names += ["reward/prompts", "reward/finished", "answers/seconds"]
            names += ["kl/against"] if "against_checkpoint" in roles else []
        if "rewards" in roles:
            names += ["reward/mean"]
            names += [f"reward/{of}/{k}" for of in ("best", "majority") for k in several(self.answers)]
        if "against_rewards" in roles:
            names += [
                f"reward/{name}"
                for name in ("against", "difference", "difference/low", "difference/high", "wins")
            ]
        return names


def several(answers: int) -> list[int]:
    """The numbers k of answers of which the best and the most frequent one are measured: powers of 2."""
    return [2**power for power in range(answers.bit_length())]
