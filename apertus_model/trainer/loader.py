"""The data loader inside torchtitan: which sample goes to which rank, as a pure function of the step.

Invariant: step s trains on the samples `first_sample(s) .. first_sample(s) + global_batch_size - 1`, whatever the number of
ranks and of accumulation steps. The ranks take turns by micro-batch, so the union over ranks and accumulation steps is that
block, in order. There is no state to save.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader


class SampleLike(Protocol):
    """See `apertus_model.data.samples.Sample`; further fields are those that the objective names."""

    @property
    def input(self) -> np.ndarray: ...
    @property
    def labels(self) -> np.ndarray: ...
    @property
    def positions(self) -> np.ndarray: ...


class Samples(Protocol):
    """A sequence of samples; `samples[i]` is a pure function of i."""

    def __getitem__(self, index: int, /) -> SampleLike: ...


Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def collate(samples: list[SampleLike], fields: Sequence[str] = ()) -> Batch:
    """`({"input", "positions", *fields}, labels)`: input, positions and labels int64 of shape (batch, seq_len); the further `fields` of
    the samples are stacked as they are."""
    names = ("input", "positions", *fields, "labels")
    tensors = {name: torch.from_numpy(np.stack([getattr(sample, name) for sample in samples])) for name in names}
    labels = tensors.pop("labels")
    return tensors, labels


class SampleLoader(BaseDataLoader):
    """Yields the micro-batches of this data-parallel rank, endlessly, from the step set by `seek`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        open_samples: Callable[[], Samples]
        first_sample: Callable[[int], int]
        global_batch_size: int
        fields: tuple[str, ...] = ()

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        **unused: Any,
    ) -> None:
        self._samples = config.open_samples()
        self._fields = config.fields
        self._first_sample = config.first_sample
        self._global_batch_size = config.global_batch_size
        self._micro_batch_size = local_batch_size
        self._ranks = dp_world_size
        self._rank = dp_rank
        self.seek(0)

    def seek(self, steps_done: int) -> None:
        """Continue after `steps_done` steps of the stage; for iterators made from now on."""
        self._steps_done = steps_done

    def rows(self) -> list[range]:
        """For each micro-batch of this rank, which rows of the step's batch it has."""
        own, turn = self._rank * self._micro_batch_size, self._ranks * self._micro_batch_size
        return [range(first, first + self._micro_batch_size) for first in range(own, self._global_batch_size, turn)]

    def __iter__(self) -> Iterator[Batch]:
        step = self._steps_done
        while True:
            begin = self._first_sample(step)
            for rows in self.rows():
                yield collate([self._samples[begin + row] for row in rows], self._fields)
            step += 1

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position follows from the step."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""
