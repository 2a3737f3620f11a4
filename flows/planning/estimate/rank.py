"""The sizes of one rank of a pipeline: its layers and parameters, and what it keeps and gathers, which
`memory` adds up.

Invariant: a pure function of shapes and layout.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from flows.planning.estimate.layer_memory import Device, LayerMemory, busiest_step, layer_runs
from flows.planning.estimate.sizes import RankSizes, parameters
from specs.capabilities import CHUNK_TOKENS
from specs.layout import backward_passes, micro_batches_in_flight
from specs.model import ModelSpec
from specs.stages.training import Segment
from specs.trainable import untouched

GATHERED_STAGES = 3
"""Stages of a rank whose weights torch's interleaved schedules hold gathered at a time."""


class BackwardPass(NamedTuple):
    """Bytes of a rank's gradients and activations when a micro-batch begins its backward pass in a stage, and
    when the pass reaches the stage's first layer."""

    gradients: float
    activations: float
    gradients_at_end: float
    activations_at_end: float


class TeacherMemory(NamedTuple):
    """Bytes of a frozen teacher, which keeps nothing for a backward pass. It reads a micro-batch while the
    student's output layer waits, so that the pass of its last layer and the student's activations are in
    memory together, and after that its output weight, its last states and the chunks of the loss."""

    shard: float = 0.0  # in the precision of the pass; and a table of positions
    layers: float = 0.0  # two gathered layers, one of them prefetched
    layer: float = 0.0  # tensors of a layer's pass
    head: float = 0.0  # gathered last norm and output weight
    states: float = 0.0  # the last hidden states, before and after the norm

    @classmethod
    def of(cls, model: ModelSpec | None, sizes: RankSizes) -> TeacherMemory:
        """The memory on a process that has the whole teacher: the last one of a pipeline."""
        if model is None:
            return cls()
        b, count, copies = sizes.b, parameters(model, sizes.tp), 0 if sizes.single else 1
        held = model.n_layers * count.layer + count.embedding + count.head
        wide = (2 if model.activation == "xielu" else 3) * model.ffn_dim / sizes.tp
        return cls(
            shard=b * held / sizes.shards + sizes.positions(model),
            layers=copies * b * 2 * count.layer,
            layer=b * sizes.tokens * (2 * model.dim + wide),
            head=copies * b * count.head,
            states=2 * b * sizes.tokens * model.dim,
        )


class Rank(RankSizes):
    """The sizes of one rank of a pipeline on a device."""

    def __init__(self, segment: Segment, processes: int, rank: int, device: Device) -> None:
        super().__init__(segment, processes, rank)
        self.device = device
        self.alone = processes == 1  # no FSDP: a layer's gradients are not in memory twice
        # on CPU, the float32 copies of a layout's single shard are not counted
        self.copies = 0 if self.alone or (self.single and self.b == 4 and device == "cpu") else 1
        # a pipeline's layers are counted as if all were Mamba-2
        self.layer = LayerMemory(self, device, mamba=self.piped and self.model.mamba is not None)
        self.in_flight = micro_batches_in_flight(self.parallel, rank, self.micro_batches)
        self.untouched = untouched(self.model, segment.trainable)  # first layers, which no gradient reaches
        self.computes_output = self.last and segment.compared is None
        has_teacher = self.last or segment.compared is not None
        self.teacher = TeacherMemory.of(segment.teacher_beside if has_teacher else None, self)
        self.backward = self.backward_passes[0]  # the one that is added up

    @cached_property
    def parameters(self) -> float:
        """The parameters of the rank, before FSDP."""
        count = self.count
        own = self.layers * count.layer + count.embedding * self.first + count.head * self.last
        return own + (self.trained.total if self.segment.adapters is not None else 0.0)

    @cached_property
    def stage_parameters(self) -> list[float]:
        stages = [number * self.count.layer for number in self.stage_layers]
        stages[0] += self.count.embedding * self.first
        stages[-1] += self.count.head * self.last
        return stages

    @property
    def gathered_stages(self) -> float:
        """Bytes of the gathered weights of the stages that are held at a time."""
        return self.b * sum(sorted(self.stage_parameters)[-GATHERED_STAGES:])

    @property
    def prefetched_layers(self) -> float:
        """Bytes of the layers that are gathered again for the backward pass: one is gathered while another is
        computed."""
        ahead = 1 if self.single else 2
        return self.copies * self.b * self.count.layer * ahead if self.parallel.reshards else 0.0

    @property
    def last_gathered_layers(self) -> float:
        """Bytes of the group that the first layer's pass computes with, and the one gathered with it."""
        return 0.0 if self.piped else self.prefetched_layers or self.copies * self.b * self.count.layer

    @property
    def gathered_by_forward(self) -> float:
        """Bytes of weights that stay gathered after a forward pass."""
        if self.parallel.reshards:
            return 0.0
        return self.gathered_stages * (1 if self.piped else self.copies)

    @property
    def gathered_head(self) -> float:
        """Bytes of the last norm and the output weight, gathered for the loss, and of the buffer from which
        they were copied, which FSDP keeps until the backward pass: there, losses that compute logits again
        need the most."""
        copies = self.copies * (1 if self.single or self.objective.recomputes_logits else 2)
        head = copies * self.b * self.count.head * self.computes_output
        return head if self.parallel.reshards else 0.0

    @property
    def pass_weights(self) -> float:
        """Bytes of the weights in the type of passes, which a process alone keeps."""
        return self.b * self.parameters if self.alone and self.b != 4 else 0.0

    def reduced(self, parameters: float) -> float:
        """Bytes of gradients that are in memory in full too while they are reduced; on a process alone, of
        one tensor, whose gradient becomes float32."""
        if self.alone:
            return self.b * min(parameters, self.largest_shard) if self.b != 4 else 0.0
        return 0.0 if self.piped else 4.0 * parameters

    @property
    def chunk(self) -> float:
        """Tokens whose logits exist at a time: losses of log-probabilities take those of one row."""
        return min(CHUNK_TOKENS, self.layer.length if self.objective.recomputes_logits else self.tokens)

    @property
    def gradient_shard(self) -> float:
        return 4.0 * self.trained.total / self.shards

    @property
    def gradient_sums(self) -> float:
        """Bytes of the summed gradients of all parameters; a pipeline sums them in full until the last
        micro-batch."""
        return 4.0 * self.trained.total if self.piped else self.gradient_shard

    @property
    def largest_shard(self) -> float:
        """Elements of the rank's part of the largest tensor that is trained."""
        return max(self.trained.head, self.count.matrices / 2) / self.shards

    @property
    def one_round(self) -> bool:
        """Whether a batch fills an interleaved pipeline once: a stage of a rank then has gradients only after
        the rank's next stage has finished all its backward passes."""
        filled = self.piped and self.micro_batches == self.pp and len(self.stage_layers) > 1
        return filled and not self.segment.trainable and self.segment.adapters is None

    @property
    def gradients_at_loss(self) -> float:
        """Bytes of the gradients when a micro-batch has its loss. If all micro-batches that a gradient sums
        wait at once, none has had its backward pass yet."""
        if self.one_round:
            return 4.0 * self.stage_parameters[-1]  # when the second micro-batch has its loss
        summed = self.micro_batches // self.segment.separate_gradients
        return self.gradient_sums if sum(self.in_flight) < summed * len(self.stage_layers) else 0.0

    @cached_property
    def runs(self) -> list[list[LayerMemory]]:
        """The layers of each step of a schedule that is not that of equal layers, one after the other."""
        alike = self.model.stock or self.piped or self.segment.compared is not None
        return [] if alike else layer_runs(self.layer)

    @property
    def summed_outputs(self) -> float:
        """Bytes of the outputs of layers that are not passed on."""
        return sum(bool(step.summed) for step in self.model.schedule) * self.layer.state

    @property
    def first_layer_works(self) -> float:
        """Bytes that a layer's backward pass adds; of compared mixers, their difference and its gradient."""
        if self.segment.compared is None:
            return self.layer.backward()
        return 2 * self.layer.result(self.segment.compared == "matrix")

    @cached_property
    def last_step(self) -> tuple[float, float]:
        """Bytes of held gradients, and those that a layer adds, in the step of the schedule whose backward
        pass has the most in memory: see `busiest_step`."""
        return busiest_step(self.layer, self.runs) if self.runs else (0.0, self.first_layer_works)

    @cached_property
    def kept(self) -> tuple[float, float]:
        """Bytes that layers keep until a backward pass, of all micro-batches that wait for theirs; and those
        among them that a pass has freed when it reaches the first layer. No gradient reaches the first
        layers if nothing before them is trained."""
        if (compared := self.segment.compared) is not None:  # no layer depends on another
            mixer = LayerMemory(self, self.device, mamba=True)
            return len(self.model.mamba_layers) * mixer.compared(compared == "matrix"), 0.0
        if self.runs:
            with_gradients = [run.kept() for step in self.runs for run in step][self.untouched :]
            return sum(with_gradients), sum(with_gradients[1:])
        layers = [self.stage_layers[0] - self.untouched, *self.stage_layers[1:]]
        kept = sum(number * size for number, size in zip(self.in_flight, layers, strict=True))
        each = self.layer.kept()
        return kept * each, max(0, layers[0] - 1) * each

    @cached_property
    def backward_passes(self) -> list[BackwardPass]:
        """The backward passes in which the memory of the rank can be largest."""
        kept, freed = self.kept
        if not self.one_round:
            return [BackwardPass(self.gradients_at_loss, kept, self.gradient_sums, kept - freed)]
        each, sizes, passes = self.layer.kept(), self.stage_parameters, []
        for stage, begins, in_flight in backward_passes(self.parallel, self.rank):
            layers = sum(number * size for number, size in zip(in_flight, self.stage_layers, strict=True))
            before, after = 4.0 * sum(sizes[stage + begins :]), 4.0 * sum(sizes[stage:])
            left = layers - max(0, self.stage_layers[stage] - 1)
            passes.append(BackwardPass(before, layers * each, after, left * each))
        return passes
