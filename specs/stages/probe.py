"""The `probe` stage: measures of a checkpoint that concern no task. `evaluate` measures forgetting and
memorisation."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from specs.base import Spec, execution, identity, option, reference
from specs.model import ModelSpec
from specs.stages.base import FromCheckpoint, Part
from specs.units import Reference


class Sharpness(Spec):
    """The trace of the Hessian of the loss divided by the number of parameters, estimated with random signs
    (Hutchinson)."""

    probes: int = identity(
        50,
        ge=2,
        description="random vectors; each costs two passes, forward and backward, over all sequences",
    )
    seed: int = identity(28)


class ProbeStage(FromCheckpoint):
    """Measures a checkpoint on the tokens, in conversations those of answers, of the first held-out sequences
    of each source: the sharpness of its loss, and its activations."""

    VERSION: ClassVar[int] = 1
    IN_LAYOUT: ClassVar[bool] = True
    kind: Literal["probe"] = identity()
    sources: list[Reference] = reference(
        min_length=1, to=("corpus", "conversations"), description="parts of corpora, or of conversations"
    )
    samples: int = identity(16, ge=1, description="maximum number of held-out sequences per source")
    sequence_length: int | None = identity(
        None, ge=8, description="length of the held-out sequences; the model's by default"
    )
    sharpness: Sharpness | None = identity(default_factory=Sharpness)
    activations: bool = option(
        False, description="measures how sparse the inputs of each layer's down projection are"
    )

    def conflicts(self) -> Iterator[str]:
        if self.sharpness is None and not self.activations:
            yield "the stage measures nothing; set sharpness or activations"

    def obstacle(self, to: Literal["pp", "tp", "cp", "float8"]) -> str:
        if to == "tp" and self.activations:
            return "the sparsity of activations is that of whole rows"
        return super().obstacle(to)


class ProbePart(Part):
    """The resolved probe. Inputs: `checkpoint`, `tokenizer`, `source:<i>`."""

    ON_ENGINE: ClassVar[bool] = True

    model: ModelSpec = identity()
    sequence_length: int = identity()
    samples: int = identity()
    sharpness: Sharpness | None = identity()
    activations: bool = option(False)
    attention: str = execution("auto")
    batch_size: int = execution(8)
