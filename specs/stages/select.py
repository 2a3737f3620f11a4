"""The `select` stage: the best of several checkpoints by a metric."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from specs.base import execution, identity, reference
from specs.stages.base import Part, Stage
from specs.units import Reference


class SelectStage(Stage):
    """Chooses one of `checkpoints` by the held-out loss of its training, or the checkpoint of one of
    `evaluations` by any of their metrics. The name of a matrix means all its variants. `from: <this stage>`
    is the chosen checkpoint, with its optimizer states and counters; nothing is copied. Among equal ones, the
    first is chosen."""

    VERSION: ClassVar[int] = 1
    RESULT: ClassVar[str] = "checkpoint"
    MEASURES_LOSS: ClassVar[bool] = True
    kind: Literal["select"] = identity()
    checkpoints: list[Reference] = reference(default_factory=list, to="checkpoint")
    evaluations: list[Reference] = reference(default_factory=list, to="evaluate")
    metric: str = identity(
        "val_loss",
        description="val_loss or val_loss/<source> of checkpoints; any metric of evaluations: reward/mean",
    )
    best: Literal["lowest", "highest"] = identity("lowest")

    def chooses_by_loss(self, checkpoint: Reference) -> bool:
        return super().chooses_by_loss(checkpoint) or checkpoint in self.checkpoints

    def conflicts(self) -> Iterator[str]:
        if bool(self.checkpoints) == bool(self.evaluations):
            yield "set either checkpoints or evaluations to choose among"
        if self.checkpoints and self.metric.split("/")[0] != "val_loss":
            yield (
                f"checkpoints are compared by val_loss or val_loss/<source>, not by '{self.metric}'; name"
                " evaluations that measured it"
            )


class SelectPart(Part):
    """The resolved selection. Inputs: `checkpoint:<i>` or `evaluation:<i>`, in the order of the recipe, which
    decides between equal ones."""

    OF_CHECKPOINTS: ClassVar[bool] = True
    PLAN_DEPENDS: ClassVar[bool] = True
    metric: str = identity()
    best: Literal["lowest", "highest"] = identity()
    names: list[str] = execution(description="names of the candidates, for people")
