"""The `domain_weights` stage: a proxy run that learns how often to draw from each source (DoGE)."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from specs.base import Spec, identity, option, reference
from specs.model import ModelSpec
from specs.settings import MixtureTraining, Phase
from specs.stages.base import DifferentReferences
from specs.stages.pretrain import without_parent
from specs.stages.training import Segment, TrainingStage

PARTS = 1_000_000
"""Learned weights are rounded to whole numbers of parts, of which this many make 1."""


class WeightUpdate(Spec):
    """The update of DoGE (arXiv 2310.15393) at every step, in the order of the authors' program. g_j is the
    gradient of the mean loss of source j, a_j the weight of a source that is trained on, and k their number.

    1. Every g_j is clipped to the norm `optimizer.grad_clip`.
    2. W_j = <g_j, sum of g_i over the targets i>; without targets i is every source, j included.
    3. s_j = W_j / (mean norm of the g of sources that are trained on + 1e-6)
    4. s_j is clipped to [0, `largest`]: a source that points away from the targets is not punished.
    5. a_j becomes a_j exp(rate s_j / mu), divided by the sum of all; `rate` is the step's learning rate.
    6. a_j becomes (1 - smoothing) a_j + smoothing / k.
    7. The model's gradient is the sum of a_j g_j, with the new weights, clipped as in 1.

    The result is the mean of the weights after every step from the first."""

    mu: float = identity(
        0.01,
        gt=0,
        description="the larger, the slower weights change. It depends on rates, norms and steps: the"
        " authors used 0.05 and 0.001 for targets, and 0.01 where the goal was the gradient of a mixture of"
        " all sources, which is 1 / k of their sum",
    )
    largest: float = identity(5.0, gt=0, description="largest s_j of a step")
    smoothing: float = identity(0.0, ge=0, lt=1, description="share of the weights that stays uniform")


class DomainWeightsSegment(Segment):
    """A resolved segment. `targets` has the positions of the targets among the sources of the mixture, in the
    order of the sources' fingerprints."""

    OBJECTIVE: ClassVar[str] = "domain-weights"
    DATA_CLASS: ClassVar[str] = "EqualMixtureData"
    PLAN_DEPENDS: ClassVar[bool] = True
    sources: int = identity(description="number of sources of the mixture, targets included")
    targets: list[int] = option(default_factory=list)
    update: WeightUpdate = identity()

    @property
    def separate_gradients(self) -> int:
        return self.sources

    @property
    def weighted(self) -> list[int]:
        return [source for source in range(self.sources) if source not in self.targets]


class DomainWeightsStage(MixtureTraining, TrainingStage):
    """Trains a small model on `mixture`, where every step has equally many sequences of each source. How much
    a source counts in the loss is learned: more where its gradient points the same way as that of the
    targets. `learned: {from: <this stage>}` of a mixture reads the mean of the weights. No training starts
    from the model itself."""

    VERSION: ClassVar[int] = 3
    RESULT: ClassVar[str] = "domain_weights"
    SEGMENT = DomainWeightsSegment
    kind: Literal["domain_weights"] = identity()
    model: ModelSpec = identity()
    seed: int = identity(28, description="seed of the initial weights")
    targets: DifferentReferences = reference(
        default_factory=list,
        to="corpus",
        description="sources of the mixture that are the goal: they are not trained on, and have no weight."
        " By default the goal is all sources together",
    )
    update: WeightUpdate = identity(default_factory=WeightUpdate)

    def conflicts(self) -> Iterator[str]:
        yield from without_parent(self, self.model, "a domain_weights stage")
        for name in ("mixture", "global_batch_size"):
            if len(getattr(self, name)) > 1:
                yield f"weights are learned on one {name}; set one instead of a map"
        if self.anomalies.skips:
            yield "the weights of a step cannot be taken back, so no step can be skipped; use anomalies: stop"

    def phases(self, name: str) -> list[Phase]:
        return [Phase(name, name, ("stages", name), self, None, model=self.model, seed=self.seed)]


def in_parts(weights: Sequence[float]) -> list[int]:
    """The weights as whole numbers of parts, of which `PARTS` make 1; each has at least one part."""
    return [max(1, round(weight * PARTS)) for weight in weights]
