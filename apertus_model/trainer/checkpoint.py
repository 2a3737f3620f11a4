"""Saving and loading of training state, with the store in charge of what is a checkpoint.

torchtitan's own manager finds the checkpoint to load by itself, prefers what lies in the output folder to what was asked for,
drops the optimizer from the last checkpoint and deletes old ones in a thread. This one implements torchtitan's contract
(`BaseCheckpointManager`) and does none of that: it loads the one location it was given, saves everything each time, and
hands a complete folder to the store, which commits and prunes.

Invariants:
- A checkpoint holds tensors only: parameters, optimizer state, and the step. Learning rate, weight decay, betas and the
  position in the data come from the spec and the step, never from a checkpoint.
- A folder is committed only when every rank has written its part.
- Whoever reads weights reads them through `load_tensors`, so nobody sees the base of an adapted model in place of the model.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER, ModelWrapper

from apertus_model.model.lora import ADAPTER_PARTS, is_adapter, merge_adapter
from apertus_model.trainer.safe_reader import CheckpointError, reader

logger = logging.getLogger(__name__)

STEP = "progress.step"


@dataclass(frozen=True)
class Source:
    """What to load: a checkpoint folder (path or URL), the step it must be of, and whether to take the optimizer's state.

    `new_adapters`: adapters of the checkpoint become part of the weights, and those of the model, if it has any, stay as they are;
    otherwise the model goes on with the adapters that are stored."""

    location: str
    step: int
    optimizer: bool
    new_adapters: bool = False


class StoreCheckpoints(BaseCheckpointManager):
    """Loads from `Config.source`, saves to where `Config.location(step)` says, then calls `Config.commit(step)` on rank 0.

    `Config.timed` surrounds what goes over to storage."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        source: Source | None = None
        location: Callable[[int], str]
        commit: Callable[[int], None]
        timed: Callable[[], AbstractContextManager[None]]

    def __init__(
        self,
        config: Config,
        *,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        **unused: Any,
    ) -> None:
        self.enable = config.enable
        self.save_future = None
        self._config = config
        self._states = {MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers}
        self._saved_step: int | None = None

    def _state(self, *, step: int, optimizer: bool) -> dict[str, Any]:
        """Every tensor under the name it is stored by; the tensors are those in use, so loading writes into them."""
        state: dict[str, Any] = dict(self._states[MODEL].state_dict())
        state[STEP] = torch.tensor(step, dtype=torch.int64)
        if optimizer:
            state |= {f"{OPTIMIZER}.{name}": value for name, value in self._states[OPTIMIZER].state_dict().items()}
        return state

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load `Config.source`. `step`, torchtitan's own choice, is ignored.

        Raises:
            CheckpointError: the checkpoint lacks an entry, or is of another step than the store says.
        """
        source = self._config.source
        if source is None:
            return False
        begin = time.monotonic()
        state = self._state(step=-1, optimizer=source.optimizer)
        if source.new_adapters:
            state = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
        with self._config.timed():
            load_tensors(state, source.location)
        if int(state[STEP]) != source.step:
            raise CheckpointError(
                f"{source.location} holds step {int(state[STEP])}, the store says {source.step}: the folder was changed "
                "after it was committed; remove the checkpoint from the store"
            )
        self._states[MODEL].load_state_dict(state)
        if source.optimizer:
            prefix = f"{OPTIMIZER}."
            self._states[OPTIMIZER].load_state_dict(
                {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            )
        logger.info("loaded %s in %.1f s", source.location, time.monotonic() - begin)
        return True

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save at every multiple of the interval and at the last step; False when there was nothing to do."""
        if curr_step == self._saved_step or not (last_step or curr_step % self._config.interval == 0):
            return False
        location = self._config.location(curr_step)
        with self._config.timed(), self._states[OPTIMIZER].averaged():  # Optimizers
            dcp.save(self._state(step=curr_step, optimizer=True), storage_writer=writer(location))
        if dist.get_rank() == 0:
            self._config.commit(curr_step)
        self._saved_step = curr_step
        return True

    def _wait_for_saving(self) -> None:
        """Saving is synchronous."""

    def _maybe_wait_for_staging(self) -> None:
        """Nothing is staged."""

    def _close(self) -> None:
        """Nothing to release."""


def writer(location: str) -> FileSystemWriter:
    """A writer for a checkpoint folder, given as local path or fsspec URL."""
    return FsspecWriter(location) if "://" in location else FileSystemWriter(location)


def load_tensors(state: dict[str, Any], location: str) -> None:
    """Read tensors of a checkpoint into `state`, in place, resharding as needed. Collective where a process group exists.

    A weight whose adapter (LoRA) is in the checkpoint and not in `state` becomes the sum of both.

    Args:
        state: name -> tensor or DTensor to fill.
        location: checkpoint folder, as local path or fsspec URL.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, has another shape, or the index holds something unexpected.
    """
    storage = reader(location)
    index = storage.read_metadata().state_dict_metadata
    missing = sorted(name for name in state if name not in index)
    if missing:
        raise CheckpointError(
            f"{location} lacks {len(missing)} of {len(state)} tensors, the first {missing[0]!r}: it belongs to another model "
            "or optimizer; start from its weights only (leave 'optimizer' out of carry) or use a matching spec"
        )
    for name, tensor in state.items():
        if tuple(index[name].size) != tuple(tensor.shape):  # read_index lets only tensors pass
            raise CheckpointError(f"{name!r} has shape {tuple(index[name].size)} in {location}, this model has {tuple(tensor.shape)}")
    dcp.load(state, storage_reader=storage)
    for name in state:
        parts = [_part(name, part) for part in ADAPTER_PARTS]
        if parts[0] in index and parts[0] not in state:
            adapter = {part: torch.empty(index[part].size, device=state[name].device) for part in parts}
            dcp.load(adapter, storage_reader=reader(location), no_dist=True)  # stages of a pipeline have adapters of their own
            merge_adapter(state[name], *adapter.values())


def _part(weight: str, part: str) -> str:
    """Name of a part of the adapter of a weight, `X.weight` -> `X.lora_a.weight`; no tensor's name for what is not a weight."""
    return f"{weight.removesuffix('weight')}{part}"
