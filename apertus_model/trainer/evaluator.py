"""Evaluation of a model on any layout: losses on held-out sequences and their gradient, log-probabilities,
divergence. Weights are read, never changed.

Invariant: every rank makes the same number of forward passes, whatever the number of sequences; rows that
only fill up a batch carry no labels and change no result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import cp_shard

from apertus_model.collectives import gathered
from apertus_model.losses.cross_entropy import IGNORE_INDEX, log_probabilities
from apertus_model.losses.distillation import kl_divergence
from apertus_model.losses.sequences import sequence_log_probabilities
from apertus_model.model.attention import gathered_order
from apertus_model.model.on_host import copy_to
from apertus_model.model.output import LossFunction
from apertus_model.trainer.loader import SampleLike, collate, model_arguments

PipelinedLoss = Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean loss on the held-out sequences of a source."""

    nats: float  # per token; for a reward model, per pair
    tokens: int  # number of labels, or pairs, in the mean


class Evaluator:
    """The measurements of a model, or of this rank's part of it, that is distributed over `parallel_dims`.
    `batch_size`: rows per forward pass and data-parallel rank. With the `pipelined_loss` of a training run
    (`ApertusTrainer.pipelined_loss`), its pipeline computes `loss`; other measurements need the logits on
    every rank, and the specs refuse them in a pipeline.

    Measurements are collective; their samples or rows are the same on every rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        parallel_dims: ParallelDims,
        device: torch.device,
        *,
        batch_size: int,
        pipelined_loss: PipelinedLoss | None = None,
    ) -> None:
        self.model, self.device, self.batch_size = model, device, batch_size
        self._dims, self._pipelined_loss = parallel_dims, pipelined_loss
        batch_mesh = parallel_dims.get_mesh("batch") if parallel_dims.dp_enabled else None
        self.ranks = batch_mesh.size() if batch_mesh is not None else 1
        self.rank = batch_mesh.get_local_rank() if batch_mesh is not None else 0

    @torch.no_grad()
    def loss(self, samples: Sequence[SampleLike]) -> HeldOutLoss:
        """Mean loss over all labels of `samples`. ValueError when they have no label."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for rows in self._batches_of_rank(samples):
            total += torch.stack(self._nats_and_labels(rows))
        nats, tokens = self._sum_over_ranks(total).tolist()
        if tokens == 0:
            raise ValueError(f"the {len(samples)} held-out sequences have no label to score")
        return HeldOutLoss(nats / tokens, int(tokens))

    def gradient(self, samples: Sequence[SampleLike]) -> None:
        """Puts the gradient of the mean loss over all labels of `samples` into `.grad` of the parameters. The
        weights may have been changed since the last pass."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a pass without gradients leaves some weights gathered
        labels = sum(int((sample.labels != IGNORE_INDEX).sum()) for sample in samples)
        self.model.zero_grad()
        with self.model.in_passes():
            for rows in self._batches_of_rank(samples):
                log_p, _, _ = self._of_labels(rows, log_probabilities)
                (-log_p.sum() / labels).backward()

    @torch.no_grad()
    def loss_by_position(
        self, samples: Sequence[SampleLike], edges: Sequence[int]
    ) -> list[tuple[float, int]]:
        """(Sum of the loss in nats, labels) by position in the document. `edges`: n + 1 increasing positions;
        bucket k has the labels at input positions edges[k] <= p < edges[k + 1], counted from 0 at the first
        token of a document. Labels outside the edges are left out."""
        total = torch.zeros(2, len(edges) + 1, dtype=torch.float64, device=self.device)
        borders = torch.tensor(edges, device=self.device)
        for rows in self._batches_of_rank(samples):
            log_p, labels, positions = self._of_labels(rows, log_probabilities)
            scored = labels != IGNORE_INDEX
            bucket = torch.bucketize(positions, borders, right=True)[scored]  # 0 lies before the first edge
            total[0].index_add_(0, bucket, -log_p[scored].double())
            total[1].index_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
        nats_by_bucket, tokens_by_bucket = self._sum_over_ranks(total)[:, 1:-1].tolist()
        return [(nats, int(tokens)) for nats, tokens in zip(nats_by_bucket, tokens_by_bucket, strict=True)]

    @torch.no_grad()
    def divergence(self, other: "Evaluator", rows: Sequence[SampleLike]) -> tuple[float, int]:
        """(Sum of KL(self || other) in nats over all positions with a label, number of these positions). The
        divergence is over the whole vocabulary. `other`: a model with the same vocabulary and layout."""
        assert (other.batch_size, other.ranks) == (self.batch_size, self.ranks), (
            "both models run on the same rows"
        )
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for own in self._batches_of_rank(rows):
            logits, labels, _ = self._of_labels(own, None)
            other_logits, _, _ = other._of_labels(own, None)
            scored = labels != IGNORE_INDEX
            total[0] += kl_divergence(_full_tensor(logits)[scored], _full_tensor(other_logits)[scored])
            total[1] += scored.sum()
        divergence, tokens = self._sum_over_ranks(total).tolist()
        return divergence, int(tokens)

    @torch.no_grad()
    def of_places(self, rows: Sequence[SampleLike], loss_fn: LossFunction) -> tuple[torch.Tensor, ...]:
        """The results of `loss_fn`, which are several tensors (batch, local sequence, ...), at every place of
        the rows: (rows, sequence, ...) on CPU, the same on every rank."""
        turns = []
        for own in self._batches_of_rank(rows):
            tensors, _, _ = self._of_labels(own, loss_fn)
            turns.append([self._gather_rows(self._whole_rows(tensor)).cpu() for tensor in tensors])
        return tuple(torch.cat(parts)[: len(rows)] for parts in zip(*turns, strict=True))

    @torch.no_grad()
    def of_sequences(
        self, rows: Sequence[SampleLike], sequences: int, loss_fn: LossFunction = log_probabilities
    ) -> torch.Tensor:
        """The sums over each sequence of the results of `loss_fn` for its labels, by default ln p(y|x), with
        the bits of training's forward pass: (rows, sequences), float32 on CPU, the same on every rank, 0
        where a row has fewer sequences. `rows`: samples with `segments`; `sequences`: most of a row."""
        group = self._dims.get_mesh("cp").get_group() if self._dims.cp_enabled else None
        turns = []
        for own in self._batches_of_rank(rows):
            values, labels, _ = self._of_labels(own, loss_fn)
            inputs, _ = collate(own, ("segments",))
            (segments,) = self._split(inputs["segments"].to(self.device))
            sums, _ = sequence_log_probabilities(values, labels, segments, sequences, group)
            turns.append(self._gather_rows(sums))
        return torch.cat(turns)[: len(rows)].cpu()

    def _batches_of_rank(self, samples: Sequence[SampleLike]) -> Iterator[list[SampleLike]]:
        """Yields the rows of this rank, in full batches, equally many on every rank."""
        turn = self.batch_size * self.ranks
        for begin in range(0, len(samples), turn):
            own = range(begin + self.rank * self.batch_size, begin + (self.rank + 1) * self.batch_size)
            yield [samples[index] if index < len(samples) else _padding(samples[0]) for index in own]

    def _nats_and_labels(self, rows: list[SampleLike]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the loss over the labels of this rank's part of the rows, and their number: float64."""
        if self._pipelined_loss is not None:
            inputs, labels = collate(rows)
            nats = self._pipelined_loss(inputs, labels, torch.ones((), device=self.device)).double()
            (own,) = self._split(labels)
            return nats, (own != IGNORE_INDEX).sum().double().to(self.device)
        log_p, labels, _ = self._of_labels(rows, log_probabilities)
        return -log_p.double().sum(), (labels != IGNORE_INDEX).sum().double()

    def _sum_over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """`sums`, added up over the ranks that see different tokens; in place."""
        if (mesh := self._dims.get_optional_mesh("loss")) is not None:
            dist.all_reduce(sums, group=mesh.get_group())
        return sums

    def _gather_rows(self, own: torch.Tensor) -> torch.Tensor:
        """The rows of all data-parallel ranks, in order."""
        if self.ranks == 1:
            return own
        return gathered(own, self._dims.get_mesh("batch").get_group(), dim=0)

    def _whole_rows(self, own: torch.Tensor) -> torch.Tensor:
        """The whole rows of a (batch, local sequence, ...) tensor, if ranks share a sequence."""
        if not self._dims.cp_enabled:
            return own
        mesh = self._dims.get_mesh("cp")
        whole = gathered(own, mesh.get_group(), dim=1)
        order = gathered_order(whole.shape[1], mesh.size(), self.model.cp_load_balancer, own.device)
        return whole[:, order.argsort()]

    def _split(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's slice of (batch, sequence) tensors, if ranks share a sequence."""
        if not self._dims.cp_enabled:
            return tensors
        slices, _ = cp_shard(self._dims.get_mesh("cp"), tensors, None, self.model.cp_load_balancer)
        return slices

    def _of_labels(
        self, rows: list[SampleLike], loss_fn: LossFunction | None
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """The results of `loss_fn`, or else the logits, the labels and the positions of this rank's part of
        the rows. With `loss_fn`, the logits of all positions are never in memory together."""
        inputs, labels = collate(rows)
        tokens, own_labels, arguments = model_arguments(
            self.model, self._dims, self.device, inputs["input"], inputs["positions"], labels
        )
        with self.model.in_passes():
            results = self.model(tokens, **arguments, labels=own_labels, loss_fn=loss_fn)
        return results, copy_to(own_labels, self.device), copy_to(arguments["positions"], self.device)


def _padding(sample: SampleLike) -> Any:
    """A row of the length of `sample` without labels and sequences, which fills up a batch."""
    labels, segments = (np.full_like(sample.labels, value) for value in (IGNORE_INDEX, -1))
    return SimpleNamespace(input=sample.input, labels=labels, positions=sample.positions, segments=segments)


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
