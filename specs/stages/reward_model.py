"""The `reward_model` stage: a model that gives a completion a number, trained on labelled pairs."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import field_validator

from specs.base import Spec, execution, identity, option, reference
from specs.settings import Lora, Phase
from specs.stages.base import DifferentReferences, Part
from specs.stages.preference_training import PairTraining
from specs.stages.sft import NO_FLOAT8, AdaptedSegment
from specs.stages.training import CarryField, carries


class RewardLoss(Spec):
    """The loss -ln sigmoid(r_c - r_r - m) + c (r_c + r_r)^2 of a pair, where r_c and r_r are the rewards of
    the chosen and of the rejected completion, and m is the margin of the pair (Bradley-Terry; arXiv
    2307.09288, 2312.09244)."""

    centring: float = identity(0.01, ge=0, description="c, which keeps the mean of the rewards near 0")


class RewardSegment(AdaptedSegment):
    """A resolved segment. Inputs: `pairs`, `tokenizer`, `parent`. A sample is a packed sequence of pairs."""

    OBJECTIVE: ClassVar[str] = "bradley-terry"
    DATA_CLASS: ClassVar[str] = "RewardData"
    loss: RewardLoss = identity()
    max_repetition: float = execution(1.0)


class RewardModelStage(PairTraining):
    """Begins with the weights of `from` and a new head, which gives one number at the end of a completion.
    Its result is a reward model: `export` and `reward: {from: ...}` read it, and no training starts from
    it. Published rates for all weights are small: 3e-6 with linear decay for Tulu 3 8B (arXiv 2411.15124)."""

    VERSION: ClassVar[int] = 1
    RESULT: ClassVar[str] = "reward_model"
    TRAINS_ON: ClassVar[str] = "pairs"
    SEGMENT = RewardSegment
    kind: Literal["reward_model"] = identity()
    carry: CarryField = carries("weights")
    pairs: DifferentReferences = reference(
        min_length=1,
        to="conversations",
        description="parts of `conversations` stages whose rows have `chosen` and `rejected`. A pair is"
        " dropped, and counted, if both of its completions with their prompts do not fit into a sequence"
        " together, or if they are equal",
    )
    margin: str | None = option(
        None,
        description="column of the rows with the margin of a pair, such as a difference of ratings: 0 or"
        " more; 0 for a row without it",
    )
    loss: RewardLoss = identity(default_factory=RewardLoss)
    data_seed: int = option(
        28, description="seed of the order of the sequences, of the head and of new adapters"
    )
    max_repetition: float = execution(
        1.0,
        gt=0,
        description="allowed passes over the pairs. One is usual: later ones fit the labels' noise. The"
        " error for a larger budget names the steps of one pass",
    )
    lora: Lora | None = option(None, description="adapters; the head is trained in any case")

    @field_validator("carry")
    @classmethod
    def _weights_alone(cls, carry: list[str]) -> list[str]:
        if carry != ["weights"]:
            raise ValueError("the head is new, and so are the optimizer's states; set carry: [weights]")
        return carry

    @property
    def adapters(self) -> Lora | None:
        return self.lora

    def obstacle(self, to: Literal["pp", "tp", "cp", "float8"]) -> str:
        return NO_FLOAT8 if to == "float8" and self.lora is not None else super().obstacle(to)

    def phases(self, name: str) -> list[Phase]:
        return [replace(phase, head="reward") for phase in super().phases(name)]


class LabelledPairsPart(Part):
    """The resolved pairs of both splits, as tokens. Inputs: `conversations:<i>`, `tokenizer`."""

    VERSION: ClassVar[int] = 1
    WORKERS: ClassVar[int] = 1
    max_tokens: int = identity(
        description="maximum tokens of both completions of a pair, each with the prompt"
    )
    margin: str | None = option(None)
    pairs_per_unit: int = execution(1024)
