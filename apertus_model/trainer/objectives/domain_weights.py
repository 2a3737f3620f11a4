"""Learned weights of the sources (DoGE, arXiv 2310.15393): `specs.stages.domain_weights.WeightUpdate` states
the update.

A batch has equally many rows of each source: those of source 0 first, then those of source 1, and so on. The
gradient of each source's mean loss is taken when its last micro-batch is done; all gradients are held until
the last micro-batch of the step, which takes k times the memory of one. Weights stay on the GPU, so that no
step waits for them. Under FSDP and tensor parallelism a rank holds shards: the sums over elements are added
up over the ranks that have different shards, and a parameter that is replicated over ranks counts once.

Invariant: all ranks have the same weights, bit for bit: rank 0 tells the others what it measured.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from apertus_model.losses.cross_entropy import LastStates, cross_entropy, total_weight
from apertus_model.model.init import local_part, sum_over_shards
from apertus_model.model.on_host import copy_to
from apertus_model.trainer.objectives.base import Extras, MicroBatch, MicroBatchLoss, Objective
from specs.stages.domain_weights import WeightUpdate

POINTS = 64  # steps of the trajectory in the facts of a checkpoint; rows of metrics have every step
Pairs = Sequence[tuple[Tensor, Tensor]]
Weights = TypeVar("Weights")


def inner_products(pairs_of_parameters: Iterable[Pairs]) -> Tensor:
    """The sums over parameters of <a, b>: (products,), float64, the same on all ranks. Each item has one pair
    for each product, of gradients of the same parameter: tensors, or DTensors without pending sums.
    Collective if a process group exists."""
    groups: dict[Any, Tensor] = {}  # sums of this rank, by how it shares parameters with others
    for pairs in pairs_of_parameters:
        first = pairs[0][0]
        key = (first.device_mesh, first.placements) if isinstance(first, DTensor) else None
        sums = torch.stack([(local_part(a) * local_part(b)).sum(dtype=torch.float64) for a, b in pairs])
        groups[key] = groups[key] + sums if key in groups else sums
    whole = []
    for key, sums in groups.items():
        whole.append(sums if key is None else sum_over_shards(sums, *key))
    total = torch.stack(whole).sum(0)
    if dist.is_initialized():
        dist.broadcast(total, 0)
    return total


def scores(products: Tensor, norms: Tensor, largest: float) -> Tensor:
    """The scores s of the sources that have a weight, from their products W and the norms of their clipped
    gradients: (sources with a weight,), float64, from 0 to `largest`."""
    return (products / (norms.mean() + 1e-6)).clamp(0.0, largest)


def updated(log_weights: Tensor, source_scores: Tensor, rate: float, settings: WeightUpdate) -> Tensor:
    """The logarithms of the weights after a step with these scores: (sources with a weight,), float64. As
    logarithms, weights that round to 0 can grow again."""
    new = torch.log_softmax(log_weights + rate * source_scores / settings.mu, 0)
    if settings.smoothing:
        new = ((1 - settings.smoothing) * new.exp() + settings.smoothing / new.numel()).log()
    return new


def thinned(trajectory: dict[str, Weights]) -> dict[str, Weights]:
    """The steps of a trajectory that are multiples of the smallest power of two that leaves at most `POINTS`
    of them up to the last step."""
    every, last = 1, max(map(int, trajectory))
    while last // every > POINTS:
        every *= 2
    return {step: weights for step, weights in trajectory.items() if int(step) % every == 0}


class DomainWeights(Objective):
    """The mean of the sources' mean cross-entropies, with a gradient and a weight for each source. The batch
    consists of `parts` consecutive parts with equally many rows."""

    fields = ("source",)

    def __init__(
        self,
        settings: WeightUpdate,
        sources: int,
        targets: Sequence[int],
        *,
        clip: float,
        rate: Callable[[int], float],
        names: Sequence[str] = (),
        z_loss: float = 0.0,
    ) -> None:
        """
        Args:
            sources: number of sources, targets included.
            targets: positions of the sources that have no weight; if empty, the goal is the sum of all.
            clip: largest norm of a gradient.
            rate: number of steps done -> learning rate of the next step.
        """
        self.parts = sources
        self._settings, self._clip, self._rate, self._z_loss = settings, clip, rate, z_loss
        self._targets = list(targets) or list(range(sources))
        self._weighted = [source for source in range(sources) if source not in targets]
        self._names = [list(names or map(str, range(sources)))[source] for source in self._weighted]
        self._gradients: list[list[Tensor]] = []  # of each source, by parameter
        k = len(self._weighted)
        self._log_weights = torch.full((k,), 1 / k, dtype=torch.float64).log()
        self._sum = torch.zeros(k, dtype=torch.float64)
        self._steps = 0
        self._trajectory: dict[str, Tensor] = {}

    @property
    def weights(self) -> Tensor:
        """The weights after the last step: (sources with a weight,), float64."""
        return self._log_weights.exp()

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        counts = torch.zeros(self.parts, dtype=torch.float64)
        for row, source in zip(labels, extras["source"].tolist(), strict=True):
            counts[source] += total_weight(row)
        return counts

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        source = batch.extras["source"]
        counts = batch.denominator[source]
        weights = torch.where(counts > 0, 1 / counts, 0.0)[:, None].expand(-1, states.labels_BL.shape[1])
        return MicroBatchLoss(cross_entropy(states, self.parts, weights, self._z_loss))

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor]) -> None:
        """Takes the gradients away. Called after the backward passes of each part."""
        gradients = []
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            elif isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                gradient = gradient.redistribute(placements=parameter.placements)
            gradients.append(gradient.mul_(self.parts))
        self._gradients.append(gradients)

    @torch.no_grad()
    def combine(self, parameters: Sequence[Tensor], step: int) -> dict[str, Tensor]:
        """Sets the gradients of the step. Called after the backward passes of its last part. Returns metrics,
        as `MicroBatchLoss.columns`, the same on all ranks. Collective."""
        gradients, self._gradients = self._gradients, []
        norms = inner_products(
            [(gradient, gradient) for gradient in of] for of in zip(*gradients, strict=True)
        ).sqrt()
        scales = (self._clip / norms).clamp(max=1.0).unbind()
        weighted, own_norms = (
            torch.stack([values[source] for source in self._weighted]) for values in (scales, norms.unbind())
        )
        products = weighted * inner_products(
            self._with_goal(of, scales) for of in zip(*gradients, strict=True)
        )
        source_scores = scores(products, weighted * own_norms, self._settings.largest)
        before = copy_to(self._log_weights, source_scores.device)
        self._log_weights = updated(before, source_scores, self._rate(step - 1), self._settings)
        self._sum = copy_to(self._sum, source_scores.device) + self.weights
        self._steps += 1
        self._trajectory = thinned({**self._trajectory, str(step): self.weights})
        factors = (self.weights * weighted).unbind()
        for index, parameter in enumerate(parameters):
            total = torch.zeros_like(parameter)
            for source, factor in zip(self._weighted, factors, strict=True):
                total.add_(gradients[source][index] * factor)
            parameter.grad = total
        return self._columns(products)

    def _with_goal(self, gradients: Sequence[Tensor], scales: Sequence[Tensor]) -> Pairs:
        """The gradient of each source with a weight, and the sum of the targets' clipped gradients."""
        goal = torch.zeros_like(gradients[0])
        for target in self._targets:
            goal.add_(gradients[target] * scales[target])
        return [(gradients[source], goal) for source in self._weighted]

    def _columns(self, products: Tensor) -> dict[str, Tensor]:
        mean = self._sum / self._steps
        return {
            f"{name}/{source}": torch.stack([value, torch.ones_like(value)])
            for name, values in (("weight", self.weights), ("mean_weight", mean), ("alignment", products))
            for source, value in zip(self._names, values.unbind(), strict=True)
        }

    def state(self) -> dict[str, Any]:
        """The state that `combine` depends on besides gradients: JSON for the facts of a checkpoint."""
        return {
            "domain_weights": {
                "names": self._names,
                "mean": (self._sum / max(1, self._steps)).tolist(),
                "log": self._log_weights.tolist(),
                "sum": self._sum.tolist(),
                "steps": self._steps,
                "trajectory": {step: weights.tolist() for step, weights in self._trajectory.items()},
            }
        }

    def results(self) -> dict[str, Any]:
        """The weight of each source by step."""
        return {
            f"trajectory/{source}/{step}": weight
            for step, weights in self._trajectory.items()
            for source, weight in zip(self._names, weights.tolist(), strict=True)
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from the facts of a checkpoint."""
        stored = state["domain_weights"]
        self._log_weights = torch.tensor(stored["log"], dtype=torch.float64)
        self._sum = torch.tensor(stored["sum"], dtype=torch.float64)
        self._steps = stored["steps"]
        self._trajectory = {
            step: torch.tensor(weights, dtype=torch.float64) for step, weights in stored["trajectory"].items()
        }


OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "domain-weights": lambda segment: DomainWeights(
        segment.update,
        segment.sources,
        segment.targets,
        clip=segment.optimizer.grad_clip,
        rate=segment.lr_at,
        names=segment.source_names,
        z_loss=segment.z_loss,
    )
}
