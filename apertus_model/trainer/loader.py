"""The data loader inside torchtitan: which sample goes to which rank, as a pure function of the step; and
what the model gets of a micro-batch.

Invariant: step s trains on the samples `first_sample(s) .. first_sample(s) + global_batch_size - 1`, whatever
the number of ranks and of accumulation steps. The ranks take turns by micro-batch, so the union over ranks
and accumulation steps is that block, in order. There is no state to save.
"""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import cp_shard

from apertus_model.device import has_gpu
from apertus_model.model.attention import gathered_order
from apertus_model.model.on_host import OnHost, copy_to
from infra.store.files.reader import in_order

PREFETCH = 8
"""Number of micro-batches read ahead. Samples that come over a network are read in as many threads: eight
requests of 20 ms at a time make 1.6 million tokens a second in sequences of 4,096. Other samples are read in
one thread, which takes a tenth of a millisecond for a sequence and idles while enough are ready."""


class SampleLike(Protocol):
    """A sample (`apertus_model.data.order.samples.Sample`) with the further fields of the objective."""

    @property
    def input(self) -> np.ndarray: ...
    @property
    def labels(self) -> np.ndarray: ...
    @property
    def positions(self) -> np.ndarray: ...


class Samples(Protocol):
    """A sequence of samples. `samples[i]` is a pure function of i, and several threads may read at once. A
    true attribute `remote` says that they come over a network."""

    def __getitem__(self, index: int, /) -> SampleLike: ...


class TrainingData(Protocol):
    """The samples of a run, for training and held-out losses; `stages.training_data` opens them."""

    @property
    def samples(self) -> Samples: ...
    @property
    def heldout(self) -> Mapping[str, Sequence[SampleLike]]:
        """Held-out sequences by the name of their source."""


Batch = tuple[dict[str, Tensor], Tensor]
T = TypeVar("T")


def collate(samples: list[SampleLike], fields: Sequence[str] = ()) -> Batch:
    """`({"input", "positions", *fields}, labels)`: input, positions and labels int64 of shape (batch,
    seq_len); the further `fields` of the samples are stacked as they are."""
    names = ("input", "positions", *fields, "labels")
    tensors = {
        name: torch.from_numpy(np.stack([getattr(sample, name) for sample in samples])) for name in names
    }
    labels = tensors.pop("labels")
    return tensors, labels


def model_arguments(
    model: Any, dims: ParallelDims, device: torch.device, tokens: Tensor, positions: Tensor, labels: Tensor
) -> tuple[Tensor, OnHost, dict[str, Any]]:
    """Tokens, labels and further arguments of `ApertusModel.forward` for this rank's part of the rows.

    The host does not wait for the device: labels stay on the host, and so do positions, from which it finds
    document boundaries. If ranks share a sequence, no backend needs positions on the host.

    `model`: `ApertusModel`, or any stage of a pipeline. `tokens`, `positions` (0 at the first token of each
    document) and `labels`: (batch, seq_len), whole rows on the host.
    """
    tokens = copy_to(tokens, device)
    if not dims.cp_enabled:
        return tokens, OnHost(labels), {"positions": OnHost(positions)}
    mesh, balancer = dims.get_mesh("cp"), model.cp_load_balancer
    positions = copy_to(positions, device)
    masks = model.get_attention_masks(positions) if model.cp_mesh is None else None
    (tokens, positions), masks = cp_shard(mesh, (tokens, positions), masks, balancer)
    arguments = {"positions": positions, **({} if masks is None else {"attention_masks": masks})}
    parts = labels[:, gathered_order(labels.shape[1], mesh.size(), balancer)].chunk(mesh.size(), dim=1)
    return tokens, OnHost(parts[mesh.get_local_rank()].contiguous()), arguments


def computed_ahead(
    calls: Iterable[Callable[[], T]], ahead: int, threads: int = 1
) -> Generator[T, None, None]:
    """The results of `calls`, in order, while `threads` threads compute the next `ahead` ones.

    Use one thread for calls that compute, since several would spend their time taking turns, and more threads
    for calls that wait for a network. With `ahead` 0, the consumer's thread makes every call when it is due.

    An exception of a call is raised where its result was due, with the traceback of the thread. At most
    `ahead` results are held, and a call is submitted only when the consumer asks for a result, so that
    nothing is busy while the consumer is. Closing the generator drops the calls that have not begun, and
    waits for none: the garbage collector may close it in a thread that holds a lock that another thread needs
    in order to end.
    """
    if not ahead:
        for call in calls:
            yield call()
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    try:
        yield from in_order(pool, calls, ahead)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class SampleLoader(BaseDataLoader):
    """The endless micro-batches of this data-parallel rank, from the step set by `seek`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        samples: Samples
        first_sample: Callable[[int], int]  # number of steps done -> first sample of the next step
        global_batch_size: int
        fields: tuple[str, ...] = ()  # fields of a sample besides input, labels and positions
        prefetch: int = PREFETCH  # micro-batches to read ahead

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **unused: Any
    ) -> None:
        turn = dp_world_size * local_batch_size
        assert config.global_batch_size % turn == 0, f"{config.global_batch_size} rows in turns of {turn}"
        self._samples = config.samples
        self._fields = config.fields
        self._first_sample = config.first_sample
        self._global_batch_size = config.global_batch_size
        self._micro_batch_size = local_batch_size
        self._ranks = dp_world_size
        self._rank = dp_rank
        self._prefetch = config.prefetch
        self._batches: Generator[Batch, None, None] | None = None
        self.seek(0)

    def seek(self, steps_done: int) -> None:
        """Continues after `steps_done` steps of the stage. Closes the current iterator and drops the batches
        that it has read ahead."""
        self.close()
        self._steps_done = steps_done

    def rows(self) -> list[range]:
        """The rows of the step's batch in each micro-batch of this rank."""
        own, turn = self._rank * self._micro_batch_size, self._ranks * self._micro_batch_size
        return [
            range(first, first + self._micro_batch_size)
            for first in range(own, self._global_batch_size, turn)
        ]

    def close(self) -> None:
        """Closes the current iterator and ends its threads."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        calls = (functools.partial(self._batch, first) for first in self._first_samples(self._steps_done))
        threads = self._prefetch if getattr(self._samples, "remote", False) else 1
        self._batches = computed_ahead(calls, self._prefetch, threads)
        return self._batches

    def _first_samples(self, step: int) -> Iterator[int]:
        """The first sample of each micro-batch of this rank."""
        while True:
            begin = self._first_sample(step)
            for rows in self.rows():
                yield begin + rows.start
            step += 1

    def _batch(self, first: int) -> Batch:
        inputs, labels = collate(
            [self._samples[first + index] for index in range(self._micro_batch_size)], self._fields
        )
        if has_gpu():  # without pinned memory, the host may wait until a copy has reached the GPU
            inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
        return inputs, labels

    def state_dict(self) -> dict[str, Any]:
        """An empty dict: the position follows from the step."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: there is no state."""
