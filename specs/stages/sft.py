"""The `sft` stage: supervised fine-tuning on conversations."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from specs.base import Spec, identity, reference
from specs.schedule import Decay, ScheduleSpec
from specs.stages.training import CarryField, FromParent, Segment, Training, carries
from specs.units import OrRest, ReferenceText


class Lora(Spec):
    """Low-rank adaptation (arXiv 2106.09685): `W + alpha / rank * B A`, only A and B are trained. The
    checkpoint holds W, A and B; a stage that starts from it reads the sum."""

    rank: int = identity(16, ge=1, le=2**16)
    alpha: float = identity(32.0, gt=0)
    targets: list[Literal["wq", "wk", "wv", "wo", "up_proj", "down_proj"]] = identity(
        default_factory=lambda: ["wq", "wk", "wv", "wo", "up_proj", "down_proj"], min_length=1
    )


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


Repeats = Annotated[
    dict[ReferenceText, Annotated[int, Field(ge=1)]],
    BeforeValidator(_repeats, json_schema_input_type=str | list[str] | dict[str, int]),
]


class SftStage(FromParent, Training):
    """Trains on the assistant's turns, thoughts and tool calls; never on outputs of tools. Conversations are
    packed into sequences and do not see each other."""

    VERSION: ClassVar[int] = 1
    CHAT: ClassVar[bool] = True
    kind: Literal["sft"] = identity()
    carry: CarryField = carries("weights")
    conversations: Repeats = reference(
        min_length=1,
        to="conversations",
        description=(
            "parts of `conversations` stages; a map gives how often each is seen per epoch:"
            " {chat/identity: 3}"
        ),
    )
    schedule: OrRest[LinearSchedule] = identity(default_factory=LinearSchedule)
    prompt_weight: float = identity(0.0, ge=0, le=1, description="weight of the loss on other tokens")
    longer: Literal["drop", "truncate"] = identity(
        "drop",
        description="what to do with conversations that do not fit into a sequence",
    )
    data_seed: int = identity(
        28, neutral=28, description="of the order of the sequences, and of new adapters"
    )
    lora: Lora | None = identity(None)


class AdaptedSegment(Segment):
    """A segment that can train adapters. `data_seed` is that of its new weights, too."""

    data_seed: int = identity(28, neutral=28)
    lora: Lora | None = identity(None, neutral=None)


class SftSegment(AdaptedSegment):
    """Resolved. Inputs: `conversations:<i>`, `tokenizer`, `parent`. A sample is a packed sequence of
    conversations."""

    repeats: list[int] = identity(description="in the order of the inputs")
    prompt_weight: float = identity(0.0, neutral=0.0)
    longer: Literal["drop", "truncate"] = identity("drop", neutral="drop")

    @property
    def objective(self) -> str:
        return "cross-entropy" if self.prompt_weight == 0 else "weighted-cross-entropy"
