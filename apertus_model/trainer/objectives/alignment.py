"""The objectives that bring the mixers of a student close to the attention of its teacher, layer by layer
(MOHAWK, arXiv 2408.10189, stages 1 and 2). Every mixer reads the input of the teacher's attention in the same
layer, so layers do not depend on each other, and nothing after a mixer is computed."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import GQAttention

from apertus_model.losses.cross_entropy import LastStates
from apertus_model.model.attention import document_mask, projected
from apertus_model.model.mamba import MambaMixer, matrix, wide
from apertus_model.trainer.objectives.base import Extras, LoadModel, MicroBatch, MicroBatchLoss, Objective
from specs.model import ModelSpec

Layers = Mapping[str, nn.Module]


def attention_matrix(attention: GQAttention, hidden: Tensor, positions: Tensor) -> Tensor:
    """softmax(Q K') for the layer's input `hidden` (batch, T, dim): (batch, heads, T, T), 0 for later tokens
    and tokens of other documents, in float32 at least."""
    queries, keys, _ = projected(attention, hidden)
    queries, keys = attention.rope(queries, keys, positions)
    queries, keys = wide(queries), wide(keys).repeat_interleave(queries.shape[2] // keys.shape[2], dim=2)
    scores = torch.einsum("bthn,bshn->bhts", queries, keys) * attention.scaling
    return scores.masked_fill(~document_mask(positions), -torch.inf).softmax(dim=-1)


def mixer_matrix(mixer: MambaMixer, hidden: Tensor, positions: Tensor) -> Tensor:
    """A mixer's counterpart of `attention_matrix`: the matrix of its states, plus d on the diagonal."""
    whole = matrix(mixer.recurrence(hidden, positions))
    skip = torch.eye(whole.shape[-1], device=whole.device, dtype=whole.dtype) * mixer.d[:, None, None]
    return whole + skip


def mixed(mixer: MambaMixer, hidden: Tensor, positions: Tensor) -> Tensor:
    """The tensor that a mixer adds to the residual stream, (batch, T, dim), in float32 at least."""
    return wide(mixer(hidden, None, positions))


class AlignedQuantity(NamedTuple):
    """The quantities of teacher and student that are compared, and their distance."""

    of_teacher: Callable[..., Tensor] | None  # None: what its attention adds to the residual stream
    of_student: Callable[..., Tensor]
    distance: Callable[[Tensor], Tensor]  # of a difference, summed over rows


QUANTITIES = {
    "matrix": AlignedQuantity(
        attention_matrix,
        mixer_matrix,
        lambda difference: torch.linalg.matrix_norm(difference).mean(dim=1).sum(),
    ),
    "hidden": AlignedQuantity(
        None, mixed, lambda difference: torch.linalg.vector_norm(difference, dim=-1).sum()
    ),
}


class Alignment(Objective):
    """The distance between student and teacher. matrix: the Frobenius norm of the difference of a head's two
    matrices over a row, averaged over heads. hidden: the norm of the difference of the two vectors that are
    added at a token. Both are averaged over rows, or tokens, of a step and over layers without attention."""

    def __init__(self, compared: Literal["matrix", "hidden"], student: ModelSpec, teacher: ModelSpec) -> None:
        self._by_row, self._quantity = compared == "matrix", QUANTITIES[compared]
        self._layers, self._spec = set(student.mamba_layers), teacher

    def begin(self, load: LoadModel) -> None:
        self._teacher = load("teacher", self._spec)

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        number = len(labels) if self._by_row else labels.numel()
        return torch.tensor(number * len(self._layers), dtype=torch.float64)

    def forward(self, model: nn.Module, tokens: Tensor, labels: Any, batch: MicroBatch) -> MicroBatchLoss:
        with torch.no_grad():
            wanted = self._teacher(tokens, **batch.arguments, run=self._read)
        return model(tokens, **batch.arguments, run=partial(self._compare, batch, wanted))

    def _read(
        self, layers: Layers, hidden: Tensor, masks: Any, positions: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """The inputs of the teacher's layers and the targets of their mixers, by the name of the layer."""
        inputs_and_targets: dict[str, tuple[Tensor, Tensor]] = {}
        for name, layer in layers.items():
            added = layer(hidden, masks, positions, branch="attention")
            if int(name) in self._layers:
                way = self._quantity.of_teacher
                inputs_and_targets[name] = (
                    hidden,
                    wide(added) if way is None else layer(hidden, masks, positions, mixer=way),
                )
                if len(inputs_and_targets) == len(self._layers):
                    break
            hidden = hidden + added
            hidden = hidden + layer(hidden, masks, positions, branch="feed_forward")
        return inputs_and_targets

    def _compare(
        self,
        batch: MicroBatch,
        wanted: Mapping[str, tuple[Tensor, Tensor]],
        layers: Layers,
        hidden: Tensor,
        masks: Any,
        positions: Tensor,
    ) -> MicroBatchLoss:
        distances = {
            name: self._quantity.distance(
                layers[name](inputs, masks, positions, mixer=self._quantity.of_student) - target
            )
            for name, (inputs, target) in wanted.items()
        }
        columns = {
            f"distance_{name}": torch.stack([distance.detach().double(), self._number(hidden)])
            for name, distance in distances.items()
        }
        total = torch.stack(list(distances.values())).sum()
        return MicroBatchLoss(total / batch.denominator.to(total.dtype), columns=columns)

    def _number(self, hidden: Tensor) -> Tensor:
        """The number of rows, or of tokens, of a micro-batch: float64."""
        rows, length = hidden.shape[:2]
        return hidden.new_full((), rows if self._by_row else rows * length, dtype=torch.float64)

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        raise NotImplementedError("the output layer is not asked")


OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "alignment": lambda segment: Alignment(segment.loss.compare, segment.model, segment.teacher)
}
