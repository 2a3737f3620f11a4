"""The `sft` stage: supervised fine-tuning on conversations.

The variants of the loss are those of swiss-ai/posttraining, src/post_training/trainers/sft.py
(`prompt_weight`, `length_normalised`, `average`) and an earlier src/swiss_alignment/trainers/sft.py
(`inverse_rl`)."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator

from specs.base import Spec, identity, option, reference
from specs.schedule import Decay, ScheduleSpec
from specs.settings import AnyPacking, Lora, Training
from specs.stages.training import CarryField, FromParent, Segment, carries
from specs.units import OrRest, ReferenceText

NO_FLOAT8 = "adapters are added to layers of the parameters' precision"


class LinearSchedule(ScheduleSpec):
    """Linear decay to 0 over the whole stage by default."""

    decay: Decay = identity("linear")
    final: float = identity(0.0, ge=0, le=1, description="fraction of the peak at the end of the decay")


def _repeats(value: Any) -> Any:
    if isinstance(value, str):
        return {value: 1}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return dict.fromkeys(value, 1)
    return value


def _number(value: int | float) -> int | float:
    """The number, as an integer if it is whole, so that 3.0 and 3 are the same spec."""
    if value <= 0:
        raise ValueError(f"{value} passes train on nothing; set more than 0, or leave the source out")
    return int(value) if value == int(value) else value


Repeat = Annotated[int | float, AfterValidator(_number)]
Repeats = Annotated[
    dict[ReferenceText, Repeat],
    BeforeValidator(_repeats, json_schema_input_type=str | list[str] | dict[str, float]),
]


class InverseRl(Spec):
    """Inverse reinforcement learning (arXiv 2409.01369), the temporal-difference term of the published code:
    the loss of a label with logit q is V - q + weight * (q - discount * V')^2, where V is the logarithm of
    the sum of the exponentials of the logits at its position, and V' that at the next position of the
    conversation, 0 after its last label."""

    weight: float = identity(0.5, gt=0)
    discount: float = identity(1.0, ge=0, le=1)


class SftLoss(Spec):
    """The loss that fine-tuning minimises: by default the mean cross-entropy of all tokens of answers in a
    step."""

    prompt_weight: float = option(0.0, ge=0, le=1, description="weight of the loss on other tokens")
    length_normalised: bool = option(
        False,
        description="whether the tokens of prompts are averaged apart from those of answers, so that long"
        " prompts weigh no more: mean over answers + prompt_weight * mean over prompts",
    )
    average: Literal["tokens", "conversations"] = option(
        "tokens",
        description="what the means are taken over. tokens: all of the step; conversations: those of a"
        " conversation, and then the conversations of the step",
    )
    inverse_rl: InverseRl | None = option(None)

    def conflicts(self) -> Iterator[str]:
        if self.length_normalised and not self.prompt_weight:
            yield "length_normalised changes nothing with prompt_weight: 0; set a prompt_weight"

    @property
    def objective(self) -> str:
        if self.inverse_rl is not None:
            return "inverse-rl"
        if self.length_normalised or self.average == "conversations":
            return "normalised-cross-entropy"
        return "cross-entropy" if self.prompt_weight == 0 else "weighted-cross-entropy"


class AdaptedSegment(Segment):
    """A segment that can train adapters. `data_seed` is also the seed of its new weights."""

    data_seed: int = option(28)
    lora: Lora | None = option(None)

    @property
    def adapters(self) -> Lora | None:
        return self.lora

    @property
    def new_weights_seed(self) -> int:
        return self.data_seed if self.seed is None else self.seed


class SftSegment(SftLoss, AdaptedSegment):
    """A resolved segment. Inputs: `conversations:<i>`, `tokenizer`, `parent`. A sample is a sequence of
    conversations."""

    DATA_CLASS: ClassVar[str] = "ConversationData"
    repeats: list[Repeat] = identity(description="repeats in the order of the inputs")
    packing: AnyPacking = option("best-fit")
    longer: Literal["drop", "truncate"] = option("drop")


class SftStage(SftLoss, FromParent, Training):
    """Trains on the assistant's turns, thoughts and tool calls; never on outputs of tools. Conversations in a
    sequence do not see each other."""

    VERSION: ClassVar[int] = 1
    CHAT: ClassVar[bool] = True
    TRAINS_ON: ClassVar[str] = "conversations"
    SEGMENT = SftSegment
    kind: Literal["sft"] = identity()
    carry: CarryField = carries("weights")
    conversations: Repeats = reference(
        min_length=1,
        to="conversations",
        description="parts of `conversations` stages; a map gives how often each is seen per epoch:"
        " {chat/identity: 3, chat/web: 0.5}. Of a fraction, each epoch has another part, and all parts have"
        " their turn",
    )
    schedule: OrRest[LinearSchedule] = identity(default_factory=LinearSchedule)
    packing: Literal["best-fit", "none"] = identity(
        "best-fit",
        description="best-fit: several conversations to a sequence; none: one, and padding, which is"
        " computed and never counts in a loss",
    )
    longer: Literal["drop", "truncate"] = identity(
        "drop",
        description="what to do with conversations that do not fit into a sequence",
    )
    data_seed: int = option(28, description="seed of the order of the sequences, and of new adapters")
    lora: Lora | None = identity(None)

    @property
    def adapters(self) -> Lora | None:
        return self.lora

    def obstacle(self, to: Literal["pp", "tp", "cp", "float8"]) -> str:
        if to == "cp" and self.inverse_rl is not None:
            return "inverse_rl compares a place with the next"
        return NO_FLOAT8 if to == "float8" and self.lora is not None else super().obstacle(to)
