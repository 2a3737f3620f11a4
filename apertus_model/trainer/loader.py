"""The data loader inside torchtitan: which sample goes to which rank, as a pure function of the step.

Invariant: step s trains on the samples `first_sample(s) .. first_sample(s) + global_batch_size - 1`, whatever
the number of ranks and of accumulation steps. The ranks take turns by micro-batch, so the union over ranks
and accumulation steps is that block, in order. There is no state to save: batches that were computed ahead
are forgotten.
"""

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader

PREFETCH = 8
"""Micro-batches read ahead. In as many threads where samples come over a network: eight answers of 20 ms at a
time make 1.6 million tokens a second in sequences of 4,096. Otherwise in one, idle while there are enough: a
sequence takes it a tenth of a millisecond."""


class SampleLike(Protocol):
    """See `apertus_model.data.samples.Sample`; further fields are those that the objective names."""

    @property
    def input(self) -> np.ndarray: ...
    @property
    def labels(self) -> np.ndarray: ...
    @property
    def positions(self) -> np.ndarray: ...


class Samples(Protocol):
    """A sequence of samples; `samples[i]` is a pure function of i, and several threads may ask at once. With
    a true attribute `remote` they come over a network."""

    def __getitem__(self, index: int, /) -> SampleLike: ...


class TrainingData(Protocol):
    """What a run trains on, and what it is measured on. `apertus_model.stages.training_data` opens it for a
    segment."""

    @property
    def samples(self) -> Samples: ...
    @property
    def heldout(self) -> Mapping[str, Sequence[SampleLike]]:
        """Held-out sequences by the name of their source."""


Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
T = TypeVar("T")


def collate(samples: list[SampleLike], fields: Sequence[str] = ()) -> Batch:
    """`({"input", "positions", *fields}, labels)`: input, positions and labels int64 of shape (batch,
    seq_len); the further `fields` of the samples are stacked as they are."""
    names = ("input", "positions", *fields, "labels")
    tensors = {name: torch.from_numpy(np.stack([getattr(sample, name) for sample in samples])) for name in names}
    labels = tensors.pop("labels")
    return tensors, labels


def computed_ahead(calls: Iterable[Callable[[], T]], ahead: int, threads: int = 1) -> Generator[T, None, None]:
    """The results of `calls`, in order, while `threads` threads compute the next `ahead` ones.

    One thread is the right number for calls that compute: more of them spend their time on taking turns.
    Calls that wait for a network overlap in as many threads as there are. With `ahead` 0 the consumer's
    thread makes every call when its result is due.

    An exception of a call is raised where its result was due, with the traceback of the thread. At most
    `ahead` results are held, and a call is submitted only when the consumer asks for a result, so that
    nothing is busy while the consumer is. Closing the generator drops the calls that have not begun and waits
    for none: the garbage collector may close it, in a thread that holds what the end of another thread needs.
    """
    if not ahead:
        for call in calls:
            yield call()
        return
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    try:
        for call in calls:
            pending.append(pool.submit(call))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class SampleLoader(BaseDataLoader):
    """Yields the micro-batches of this data-parallel rank, endlessly, from the step set by `seek`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        samples: Samples
        first_sample: Callable[[int], int]  # of the step that follows so many steps
        global_batch_size: int
        fields: tuple[str, ...] = ()  # of a sample, beside input, labels and positions
        prefetch: int = PREFETCH

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        **unused: Any,
    ) -> None:
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
        """Continue after `steps_done` steps of the stage. Ends the iterator in use, with what it has read
        ahead."""
        self.close()
        self._steps_done = steps_done

    def rows(self) -> list[range]:
        """For each micro-batch of this rank, which rows of the step's batch it has."""
        own, turn = self._rank * self._micro_batch_size, self._ranks * self._micro_batch_size
        return [range(first, first + self._micro_batch_size) for first in range(own, self._global_batch_size, turn)]

    def close(self) -> None:
        """Ends the iterator in use and its threads."""
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
        return collate([self._samples[first + index] for index in range(self._micro_batch_size)], self._fields)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position follows from the step."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""
