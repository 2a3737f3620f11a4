"""Builds the trainer of a rank and runs one step of it, as a stage's process would.

Samples have the shape that each kind of training reads: whole rows, every label trained, which is the largest
number that a step can have. The other stages of a pipeline are stood in for as far as this rank asks them:
for the shapes of what they send. The shapes that this rank states must equal those that it receives, so that
a wrong assumption fails.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import _utils as pipelining
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import apertus_model.trainer  # before anything of torchtitan  # noqa: F401
from apertus_model.data.tokens.stream import IGNORE_INDEX
from apertus_model.model.init import local_part
from apertus_model.rehearsal import patches, records
from apertus_model.rehearsal.exchanges import SUMMED, Exchange
from apertus_model.rehearsal.observer import StepObserver
from apertus_model.rehearsal.rates import Rates
from apertus_model.trainer.config import attention_of, trainer_config
from apertus_model.trainer.lifecycle import Lifecycle
from apertus_model.trainer.process import engine_process
from infra.store.scratch import temporary_folder
from specs.capabilities import OBJECTIVES
from specs.stages import segment_of
from specs.stages.training import Segment

LARGEST = 12  # lines of tensors
LONGEST = 20  # lines of operators
DIMENSIONS = ("fsdp", "dp_replicate", "tp", "cp", "pp", "batch", "loss")
PIECES = 400  # pieces of the time of a step, each reported with its memory


class Nowhere:
    """A storage and recorder that saves no checkpoint and records nothing."""

    def timed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def rehearse(task: records.RankTask) -> records.Rehearsed:
    """Builds the rank and runs its first step."""
    segment = segment_of(task.kind).model_validate(task.segment)
    rates = Rates(task.gpu, task.gpus_per_node)
    sparse, length = segment.model.attention, segment.sequence_length
    pairs = None if sparse is None else length**2 * sparse.share(length)
    observer, peers = StepObserver(rates, task.device, segment.compile, pairs), PipelinePeers()
    patches.apply([
        *patches.world(peers),
        *patches.values(observer.read, observer.unseen, observer.allocations.resized, observer.launched),
    ])  # fmt: skip
    torch.autograd.set_multithreading_enabled(False)
    with engine_process(threads=1) as world_size, temporary_folder("rehearsal") as scratch:
        dist.init_process_group("fake", rank=task.rank, world_size=world_size, store=FakeStore())
        lifecycle = Lifecycle(
            begin_step=segment.start_step,
            source=None,
            storage=Nowhere(),
            stop_requested=lambda: False,
            scratch=str(scratch),
        )
        data: Any = SimpleNamespace(samples=EqualRows(segment), heldout={})
        config = trainer_config(segment, data, Nowhere(), lifecycle, world_size=world_size)
        with observer:
            trainer = config.build()
            batches = trainer.begin()
            if segment.parallel.async_tp:
                observer.exchanges.overlapped = trainer.parallel_dims.get_mesh("tp").get_group().group_name
            _name_tensors(observer, trainer)
            if trainer.parallel_dims.pp_enabled:
                peers.describe(trainer)
            trainer.step += 1
            observer.begin()
            trainer.train_step(batches)
            observer.costs.end_fusion()
        report = _report(observer, trainer, rates, str(attention_of(segment)))
        trainer.close()
    return report


def _name_tensors(observer: StepObserver, trainer: Any) -> None:
    states = [state for optimizer in trainer.optimizers.optimizers for state in optimizer.state.values()]
    values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    observer.allocations.name(map(local_part, _parameters(trainer)), "weights")
    observer.allocations.name(map(local_part, values), "optimizer_states")
    buffers = [buffer for part in trainer.model_parts for buffer in part.buffers()]
    observer.allocations.name(map(local_part, buffers), "other")


def _parameters(trainer: Any) -> Iterator[torch.nn.Parameter]:
    for part in trainer.model_parts:
        yield from part.parameters()


def _report(observer: StepObserver, trainer: Any, rates: Rates, attention: str) -> records.Rehearsed:
    gradients = [parameter.grad for parameter in _parameters(trainer) if parameter.grad is not None]
    observer.allocations.name(map(local_part, gradients), "gradients")
    alone = [part.pass_weights for part in trainer.model_parts if part.pass_weights is not None]
    observer.allocations.name([copy for weights in alone for copy in weights.copies], "weights")
    costs = observer.costs
    operators = [
        records.Operators(
            kind=key[0], operator=key[1], calls=costs.calls[key], flops=costs.flops[key],
            bytes=costs.moved[key], seconds=seconds,
        )
        for key, seconds in sorted(costs.seconds.items(), key=lambda item: -item[1])
    ]  # fmt: skip
    collectives = _collectives(observer, trainer)
    compute = sum(line.seconds for line in operators)
    beside = sum(line.seconds for line in collectives if line.mesh in records.HIDDEN)
    waited = (
        sum(line.seconds - line.hidden_seconds for line in collectives) - beside + max(0.0, beside - compute)
    )
    flops, kinds = Counter[str](), dict.fromkeys(records.OPERATORS, 0.0)
    for line in operators:
        flops[line.kind] += line.flops
        kinds[line.kind] += line.seconds
    return records.Rehearsed(
        attention=attention,
        layers=[name for part in trainer.model_parts for name in part.layers],
        micro_batches=trainer.gradient_accumulation_steps * trainer.num_pipeline_parallel_microbatches,
        memory=_memory(observer),
        collectives=collectives,
        flops={kind: flops[kind] for kind in ("matrix", "attention")},
        synchronisations=[
            records.Synchronisation(place=at, what=what, calls=calls)
            for (at, what), calls in observer.waits.most_common()
        ],
        operators=operators[:LONGEST],
        kinds=kinds,
        classes=dict(costs.classes),
        bound=rates.bound(kinds),
        compute_seconds=compute,
        waited_seconds=waited,
        seconds=compute + waited,
    )


def _memory(observer: StepObserver) -> records.PeakMemory:
    live = observer.allocations.peak()
    kinds, sizes, numbers = dict.fromkeys(records.KINDS, 0), Counter[Any](), Counter[Any]()
    for storage in live:
        kinds[storage.kind] += storage.bytes
        key = storage.origin.operator, storage.origin.shape, storage.origin.dtype, storage.kind
        sizes[key] += storage.bytes
        numbers[key] += 1
    return records.PeakMemory(
        total=sum(kinds.values()),
        kinds=kinds,
        largest=[
            records.Tensors(
                operator=key[0], shape=key[1], dtype=key[2], kind=key[3], number=numbers[key], bytes=size
            )
            for key, size in sizes.most_common(LARGEST)
        ],
        moments=[
            records.Moment(seconds=time, kinds=tuple(now[kind] for kind in records.KINDS))
            for time, now in observer.allocations.moments(PIECES)
        ],
    )


def _collectives(observer: StepObserver, trainer: Any) -> list[records.Collectives]:
    dims = trainer.parallel_dims
    names: dict[str, str] = {}
    for dimension in DIMENSIONS:
        mesh = dims.get_optional_mesh(dimension)
        if mesh is not None and mesh.size() > 1:
            names.setdefault(mesh.get_group().group_name, dimension)
    alike = defaultdict[tuple[str, str, int], list[Exchange]](list)
    for (kind, group), exchange in observer.exchanges.sent.items():
        size = len(exchange.ranks)
        mesh = names.get(group, "world" if size == dist.get_world_size() else "other")
        alike[kind, mesh, size].append(exchange)
    lines = []
    for (kind, mesh, size), exchanges in alike.items():
        sums = {name: sum(getattr(exchange, name) for exchange in exchanges) for name in SUMMED}
        lines.append(records.Collectives(kind=kind, mesh=mesh, ranks=size, **sums))
    return sorted(lines, key=lambda line: -line.seconds)


class EqualRows:
    """Rows all alike: one document that fills the row; for preferences, pairs of equal lengths."""

    def __init__(self, segment: Segment) -> None:
        length = segment.sequence_length
        sequences = 2 * records.PAIRS
        part = -(-length // sequences)
        ones = np.ones(sequences, dtype=np.float32)
        facts = OBJECTIVES[segment.objective]
        rewards = facts.rows == "rewards"
        k = segment.stored_words
        labels = np.zeros(length, dtype=np.int64)
        if rewards:  # a label at the end of each sequence
            labels[(np.arange(length) + 1) % part != 0] = IGNORE_INDEX
            labels[-1] = 0
        self._row = SimpleNamespace(
            input=np.zeros(length, dtype=np.int64),
            labels=labels,
            positions=np.arange(length) % (length if facts.rows == "tokens" else part),
            weights=np.ones(
                (length, 1) if facts.label_weights == "one per sum" else length, dtype=np.float32
            ),
            counts=np.ones(1),
            segments=np.arange(length) // part,
            rewards=ones / 2,
            reference=-ones,
            margins=np.zeros(records.PAIRS, dtype=np.float32),
            teacher_words=np.zeros((length, k), dtype=np.int32) + np.arange(k, dtype=np.int32),
            teacher_log_p=np.full((length, k + 1), -np.log(k + 1), dtype=np.float32),
            source=0,
            present=ones[:: 2 if rewards else 1] > 0,
        )

    def __getitem__(self, index: int) -> Any:
        return self._row


class PipelinePeers:
    """The methods that replace those of torch's schedule and `PipelineStage`."""

    hidden: Any = None  # description of the hidden states that pass from stage to stage

    def describe(self, trainer: Any) -> None:
        """Notes the hidden states of a trainer that has been built."""
        training, dims = trainer.config.training, trainer.parallel_dims
        model = trainer.config.model_spec.model
        rows = trainer.config.parallelism.pipeline_parallel_microbatch_size
        length, split = training.seq_len // dims.cp, trainer.config.parallelism.enable_sequence_parallel
        if dims.tp_enabled and split:
            length //= dims.tp
        dtype = getattr(torch, training.mixed_precision_param)
        states = torch.empty(rows, length, model.dim, dtype=dtype, device=trainer.device)
        if dims.tp_enabled:
            placement = Shard(1) if split else Replicate()
            states = DTensor.from_local(states, dims.get_mesh("tp"), [placement], run_check=False)
        self.hidden = pipelining.extract_tensor_meta(states.requires_grad_())

    def agree(self, schedule: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """Stands in for the vote of the stages: they learn the shapes of what they exchange."""
        for stage in stages:
            stage._inference_mode = pipelining.InferenceMode.DYNAMIC

    def receive(self, stage: Any, peer: int) -> Any:
        """The shapes that a peer states: hidden states from the previous stage, gradients from the next."""
        if peer < stage.stage_index:
            return pipelining._StageForwardMeta(forward_metas=(self.hidden,))
        return pipelining._StageBackwardMeta(backward_metas=(self._gradient,))

    def send(self, stage: Any, shapes: Any, peer: int) -> None:
        """Compares the shapes that this rank states with those that it receives."""
        forward = isinstance(shapes, pipelining._StageForwardMeta)
        (own,) = shapes.forward_metas if forward else shapes.backward_metas
        expected = self.hidden if forward else self._gradient
        assert own == expected, f"stage {stage.stage_index} sends {own}, and would be sent {expected}"

    @property
    def _gradient(self) -> Any:
        return dataclasses.replace(self.hidden, requires_grad=False)
