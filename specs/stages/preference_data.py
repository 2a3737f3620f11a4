"""The `preference_data` stage: makes scored pairs of completions from prompts and an instruct model.

Each step is an artifact: prompts -> (model ->) completions -> rewards -> pairs -> log_probabilities. A
changed reward samples nothing again; a changed rule for pairs scores nothing again.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from specs.base import Spec, execution, identity, option, reference
from specs.errors import FieldPath, Problem
from specs.launch import HeldModel
from specs.rewards import RewardSpec
from specs.server import Server
from specs.settings import Precision
from specs.sources import CONVERSATIONAL, TOKENISED, SourceSpec
from specs.stages.base import DifferentReferences, FromCheckpoint, Part
from specs.stages.training import ForwardPart
from specs.units import Reference


class Sampling(Spec):
    """The settings by which completions are sampled. Results are the same for any division into units, and
    change with `batch_size`."""

    n: int = identity(10, ge=1, le=10_000, description="completions per prompt")
    temperature: float = identity(1.0, ge=0, description="0 is greedy")
    top_p: float = identity(1.0, gt=0, le=1)
    max_new_tokens: int = identity(ge=1)
    seed: int = identity(28)
    batch_size: int = identity(32, ge=1, le=10_000, description="prompts that are completed together")
    engine: Literal["transformers", "vllm", "server"] = option(
        "transformers",
        description="vllm: in a separate environment, on launch.parallel.tp GPUs; server: the one that"
        " `server` names",
    )
    server: Server | None = option(None, description="server for `engine: server`")
    expected_tokens: int | None = execution(
        None,
        ge=1,
        description="mean tokens of a completion, for estimates; max_new_tokens, a bound, by default",
    )
    expected_prompt_tokens: int | None = execution(
        None, ge=1, description="mean tokens of a prompt, for estimates; what max_tokens allows by default"
    )

    def conflicts(self) -> Iterator[str]:
        expected, most = self.expected_tokens or 0, self.max_new_tokens
        if expected > most:
            yield f"expected_tokens {expected:,} is above max_new_tokens {most:,}; set {most} or less"
        if (self.engine == "server") != (self.server is not None):
            yield "engine: server and server: {url, model} belong together; set both or neither"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def distinct(self) -> int:
        """The completions of a prompt that are computed; greedy ones are all the same, and one is copied."""
        return 1 if self.greedy else self.n

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float) -> float:
        if 0 < temperature < 0.01:
            raise ValueError(
                f"logits divided by {temperature:g} overflow; set 0, which is greedy, or 0.01 or more"
            )
        return temperature

    @property
    def held_model(self) -> HeldModel | None:
        """The model that a process holds in order to sample; None if a server samples."""
        vllm = self.engine == "vllm"
        return None if self.engine == "server" else HeldModel("model", vllm=vllm, shared=vllm)

    @property
    def by_chat(self) -> bool:
        """Whether a server answers with a model of its own."""
        return self.server is not None and self.server.api == "chat"


class Personas(SourceSpec):
    """Files with personas, one per document. A prompt gets one of them as its system message, by a hash of
    the seed and the prompt; a system message of its own follows."""

    template: str = option("{persona}", description="template of the system message")
    seed: int = identity(28)

    def conflicts(self) -> Iterator[str]:
        if self.format in (*CONVERSATIONAL, *TOKENISED):
            yield f"personas are texts, and format {self.format} has none; use jsonl, or text"
        if "{persona}" not in self.template:
            yield "a template without {persona} is the same for all of them; add it"


class Generator(Spec):
    """A further model that answers the prompts. Its answers are offline completions: they are rewarded, and
    can be in pairs, but are not a reference for quantiles."""

    from_: Reference | None = reference(
        None,
        alias="from",
        to="checkpoint",
        description="a checkpoint with the same tokenizer, or `hf:` with any causal language model",
    )
    completions: Sampling = identity(description="how the answers are sampled")
    personas: Personas | None = identity(None, description="system messages of the questions to it")

    def conflicts(self) -> Iterator[str]:
        if (self.from_ is None) != self.completions.by_chat:
            yield "a generator has from:, or a server with api: chat, which has a model of its own; set one"


class PreferenceSet(FromCheckpoint):
    """Completions with quantile rewards, and their log-probabilities under the model of `from`, which is the
    reference of the loss."""

    IN_LAYOUT: ClassVar[bool] = True
    sequence_length: int | None = identity(
        None,
        ge=8,
        description="length of the packed training sequences; the model's by default",
    )
    precision: Precision | None = identity(
        None, description="precision of the reference log-probabilities; the model's by default"
    )

    def field_problems(self, at: FieldPath) -> Iterator[Problem]:
        if self.precision is not None and self.precision.linear != "param":
            message = (
                "reference log-probabilities are not computed in float8: they depend on the rows of a batch"
            )
            yield Problem((*at, "precision", "linear"), message, "set linear: param.")


class PreferenceDataStage(PreferenceSet):
    """Pairs of completions. The model of `from` is the reference of the loss, and samples the reference
    completions unless `sampler` does."""

    VERSION: ClassVar[int] = 1
    kind: Literal["preference_data"] = identity()
    prompts: DifferentReferences = reference(
        min_length=1,
        to="conversations",
        description="training splits of parts of `conversations` stages",
    )
    limit: int | None = identity(None, ge=1, description="maximum number of prompts")
    offline: bool = identity(True, description="whether completions from the conversations can be in pairs")
    max_tokens: int | None = identity(
        None,
        ge=2,
        description="maximum tokens of prompt and completion together; longer completions are dropped; half"
        " of sequence_length by default",
    )
    completions: Sampling = reference(description="reference completions, sampled from the model")
    sampler: Reference | None = reference(
        None,
        to="checkpoint",
        description="model that samples the completions in place of that of `from`: another checkpoint with"
        " the same tokenizer, or `hf:` with any causal language model, asked by its own chat template",
    )
    generators: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")], Generator] = reference(
        default_factory=dict, description="other models whose answers are offline completions, by name"
    )
    reward: RewardSpec = reference()
    pairs: Literal[1, 2] = identity(1, description="pairs per prompt")
    worst_quantile: float = identity(
        0.2, ge=0, le=1, description="a completion is among the worst up to this quantile, or up to 1/n"
    )
    seed: int = identity(28)
    prompts_per_unit: int = execution(64, ge=1, description="prompts per restartable unit of work")


class PromptsPart(Part):
    """The resolved prompts. Inputs: `conversations:<i>`, `tokenizer`. Keeps prompts with at least
    `min_branches` completions that are short enough, from the conversations or still to be `sampled`."""

    VERSION: ClassVar[int] = 1
    WORKERS: ClassVar[int] = 1
    split: Literal["train", "validation"] = identity()
    limit: int | None = option(None)
    seed: int = option(28)
    offline: bool = option(True)
    max_tokens: int = identity(description="maximum tokens of prompt and completion")
    max_new_tokens: int = identity(description="room for a sampled completion")
    sampled: int = identity(description="completions per prompt that will be sampled")
    min_branches: int = option(2)
    prompts_per_unit: int = execution(64)


class CompletionsPart(Part):
    """The resolved completions. Inputs: `prompts`; `model` (an export, or a folder of any model), but not
    with `server.api: chat`; `tokenizer` of the prompts, if the model has another one; `personas`."""

    VERSION: ClassVar[int] = 1
    WORKERS: ClassVar[int] = 1
    HELD_BY: ClassVar[str] = "sampling"
    sampling: Sampling = identity()
    personas: Personas | None = option(None)
    prompts_per_unit: int = execution(64)


class RewardsPart(Part):
    """The resolved rewards. Inputs: `prompts`, `completions`, `generated:<i>` (completions of generators),
    `tokenizer`, and `reward_model` (documents outside the store, or an export) if a model scores."""

    VERSION: ClassVar[int] = 1
    WORKERS: ClassVar[int] = 1
    HELD_BY: ClassVar[str] = "reward"
    reward: RewardSpec = identity()
    license: str = execution("", description="license from the model card of the folder that scores")
    prompts_per_unit: int = execution(64)


class PairsPart(Part):
    """The resolved pairs. Inputs: `prompts`, `completions`, `generated:<i>`, `rewards`."""

    VERSION: ClassVar[int] = 2
    pairs: int = identity()
    worst_quantile: float = identity()
    max_tokens: int = identity()
    seed: int = option(28)


class LogProbabilitiesPart(ForwardPart):
    """The resolved log-probabilities. Inputs: `checkpoint`, `pairs` (or completions by themselves),
    `tokenizer`. They are computed over the packed training sequences, by the same engine and in the same
    precision, so that the first log-ratio of training is exactly zero."""

    VERSION: ClassVar[int] = 1
    sequences_per_unit: int = execution(64, description="packed sequences per restartable unit of work")
