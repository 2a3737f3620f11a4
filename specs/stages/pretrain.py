"""The `pretrain` stage: training from new weights, in segments."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from specs.base import identity
from specs.model import ModelSpec
from specs.settings import MixtureTraining, Phase
from specs.stages.training import TrainingStage
from specs.units import REST


class PretrainStage(TrainingStage, MixtureTraining):
    """Begins a trajectory, so everything that later stages inherit must be stated here."""

    VERSION: ClassVar[int] = 1
    CONTINUED_BY: ClassVar[str] = "cooldown"
    kind: Literal["pretrain"] = identity()
    model: ModelSpec = identity()
    seed: int = identity(28, description="seed of the initial weights")

    def conflicts(self) -> Iterator[str]:
        yield from without_parent(self, self.model, "a pretrain stage")

    def phases(self, name: str) -> list[Phase]:
        return [Phase(name, name, ("stages", name), self, None, model=self.model, seed=self.seed)]


def without_parent(stage: MixtureTraining, model: ModelSpec, what: str) -> Iterator[str]:
    """Why a stage with new weights, which is `what`, would need a parent's settings."""
    if model.head != "vocabulary":
        yield (
            "pretraining needs the logits of a vocabulary; leave out model.head, which a reward_model stage"
            " sets"
        )
    for name in ("global_batch_size", "sequence_length", "mixture", "schedule", "budget"):
        if getattr(stage, name) is None:
            yield f"{what} has no parent to take {name} from; set it"
        if getattr(stage, name) == REST:
            yield f"{what} has no parent, and so no {REST} for {name}; set it"
    if stage.optimizer.lr is None:
        yield f"{what} has no parent to take the learning rate from; set optimizer.lr"
