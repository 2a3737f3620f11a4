"""Saves and loads the training state. The store decides what is a checkpoint.

torchtitan's own manager finds the checkpoint to load by itself, prefers what lies in the output folder to
what was asked for, drops the optimizer from the last checkpoint and deletes old ones in a thread. This one
implements torchtitan's contract (`BaseCheckpointManager`) and does none of that: it loads the one checkpoint
it was given, saves everything each time, and hands a complete folder to the store, which commits and prunes.

A save copies the state to host memory, for which training stands still, and writes the copy in a thread, with
a process group of its own.

Invariants:
- A checkpoint holds tensors only: parameters, optimizer state, and the step. Learning rate, weight decay,
  betas and the position in the data come from the spec and the step, never from a checkpoint.
- A folder is committed only when every rank has written its part. At most one save is in progress: the next one
  waits for it.
- A save that fails is an error of the run, at the next step at the latest; nothing ends before the last one
  is committed.
- All readers of weights use `load_tensors`, so that none takes the base of an adapted model for the model.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER, ModelWrapper

from apertus_model.model.lora import ADAPTER_PARTS, is_adapter, merge_adapter
from apertus_model.trainer.anomalies import AnomalyState
from apertus_model.trainer.checkpoint_reader import CheckpointError, read_errors, reader
from apertus_model.trainer.checkpoint_writer import CheckpointWriter, Records, StagedPlan, Staging
from infra.store import Checkpoint

logger = logging.getLogger(__name__)

STEP = "progress.step"
# Of the collectives of a save, in which ranks wait for the slowest. `HangWatch` watches training.
UPLOAD_TIMEOUT = timedelta(days=1)


class UploadError(RuntimeError):
    """A checkpoint was not stored."""


@dataclass(frozen=True)
class Source:
    """What to load."""

    checkpoint: Checkpoint | str  # a committed one, or the local folder of one that no marker names
    step: int  # that the checkpoint must be of
    optimizer: bool  # whether to load the optimizer's state too
    # True: adapters of the checkpoint become part of the weights, and those of the model, if any, keep their
    # initial values. False: the model continues with the stored adapters.
    new_adapters: bool = False


@dataclass(frozen=True)
class Saved:
    """The files of a checkpoint, when all ranks have written theirs."""

    step: int
    files: Records
    stall_seconds: float  # that training stood still, on rank 0
    upload_seconds: float  # that writing took

    @property
    def bytes(self) -> int:
        return sum(record.size for record in self.files.values())


Commit = Callable[[Saved], None]


class CheckpointStorage(Protocol):
    """Where the checkpoints of a run go."""

    def writer(self, step: int) -> CheckpointWriter:
        """A writer of the files of the checkpoint of a step."""

    def prepare_commit(self, step: int, anomalies: AnomalyState) -> Commit:
        """Called on rank 0 when the state of a step is copied, with that of the anomaly detector. Notes
        what is known then. What it returns makes the files a checkpoint, and is called from a thread when all
        ranks have written."""

    def committed(self, step: int) -> Checkpoint | str:
        """The committed checkpoint of a step of this run."""

    def timed(self) -> AbstractContextManager[None]:
        """Surrounds what training waits for."""


class StoreCheckpoints(BaseCheckpointManager):
    """Loads from `Config.source`; saves at the steps that are due, and on request."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        storage: CheckpointStorage
        source: Source | None = None  # to begin from; None: initial weights
        due: Callable[[int], bool]  # whether a checkpoint of this step is due

    anomalies: Callable[[], AnomalyState] = AnomalyState  # what a checkpoint stores of them; set by the trainer

    def __init__(
        self,
        config: Config,
        *,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        **unused: Any,
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        self.saved_step: int | None = None
        self._config = config
        self._states = {MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers}
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._group = dist.new_group(backend="gloo", timeout=UPLOAD_TIMEOUT)

    def _state(self, *, step: int, optimizer: bool) -> dict[str, torch.Tensor]:
        """Every tensor by its stored name. They are the tensors in use: loading writes into them."""
        state: dict[str, torch.Tensor] = dict(self._states[MODEL].state_dict())
        state[STEP] = torch.tensor(step, dtype=torch.int64)
        if optimizer:
            state |= {f"{OPTIMIZER}.{name}": value for name, value in self._states[OPTIMIZER].state_dict().items()}
        return state

    def _load(self, step: int = -1) -> bool:
        """Load `Config.source`. `step`, torchtitan's own choice, is ignored.

        Raises:
            CheckpointError: the checkpoint lacks an entry, or is of another step than the store says.
            DamagedCheckpoint: it is not what was committed.
        """
        if self._config.source is None:
            return False
        self._read(self._config.source)
        return True

    def restore(self, step: int) -> None:
        """Weights and optimizer state become those of a committed checkpoint of this run. Collective.

        Raises:
            CheckpointError, DamagedCheckpoint: as when loading.
        """
        self._read(Source(self._config.storage.committed(step), step, optimizer=True))

    @torch.no_grad()
    def _read(self, source: Source) -> None:
        begin = time.monotonic()
        state = self._state(step=-1, optimizer=source.optimizer)
        if source.new_adapters:
            state = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
        with self._config.storage.timed():
            load_tensors(state, source.checkpoint)
        if int(state[STEP]) != source.step:
            raise CheckpointError(
                f"{reader(source.checkpoint).folder.name} holds step {int(state[STEP])}, the store says {source.step}: the folder was "
                "changed after it was committed; remove the checkpoint from the store"
            )
        self._states[MODEL].load_state_dict(state)
        if source.optimizer:
            prefix = f"{OPTIMIZER}."
            self._states[OPTIMIZER].load_state_dict(
                {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            )
        logger.info("loaded %s in %.1f s", reader(source.checkpoint).folder.name, time.monotonic() - begin)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Begins to save when a checkpoint is due, or with `last_step`. Returns whether it does.

        Raises:
            UploadError: the previous save failed.
        """
        if curr_step == self.saved_step or not (last_step or self._config.due(curr_step)):
            return False
        begin = time.perf_counter()
        with self._config.storage.timed():
            self.maybe_wait_for_saving()
            with self._states[OPTIMIZER].averaged():  # Optimizers
                state = self._state(step=curr_step, optimizer=True)
                copies = self._staging.copy(state)
        chief = dist.get_rank() == 0
        plan = StagedPlan(state, copies, is_coordinator=chief)
        commit = self._config.storage.prepare_commit(curr_step, self.anomalies()) if chief else None
        self.saved_step = curr_step
        self.save_future = self._thread.submit(self._upload, curr_step, copies, plan, commit, time.perf_counter() - begin)
        return True

    def _upload(self, step: int, copies: dict[str, torch.Tensor], plan: StagedPlan, commit: Commit | None, stall: float) -> None:
        """In a thread of every rank: collective over `_group`."""
        begin = time.perf_counter()
        writer = self._config.storage.writer(step)
        with raise_cause():
            dcp.save(copies, storage_writer=writer, planner=plan, process_group=self._group)
        if commit is not None:
            commit(Saved(step, writer.records, stall, time.perf_counter() - begin))

    @property
    def failed(self) -> bool:
        """Whether the save in progress has failed on this rank."""
        return self.save_future is not None and self.save_future.done() and self.save_future.exception() is not None

    def _wait_for_saving(self) -> None:
        """UploadError when it fails."""
        assert self.save_future is not None
        future, self.save_future = self.save_future, None
        if (error := future.exception()) is not None:
            raise UploadError(f"the checkpoint of step {self.saved_step} was not stored: {type(error).__name__}: {error}") from error

    def _maybe_wait_for_staging(self) -> None:
        """Staging is over when `_save` returns."""

    def _close(self) -> None:
        """Waits for the save in progress. Logs its failure, unless it was raised before."""
        self._thread.shutdown(wait=True)
        if self.failed:
            assert self.save_future is not None
            logger.error("the checkpoint of step %d was not stored: %s", self.saved_step, self.save_future.exception())
        self.save_future = None


@contextmanager
def raise_cause() -> Iterator[None]:
    """Raises the first error of a rank instead of DCP's `CheckpointException`, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise next(cause for cause, _ in error.failures.values()) from error


def load_tensors(state: dict[str, torch.Tensor], checkpoint: Checkpoint | str) -> None:
    """Read tensors of a checkpoint into `state`, in place, resharding as needed. Collective where a process
    group exists.

    A weight whose adapter (LoRA) is in the checkpoint and not in `state` becomes the sum of both.

    Args:
        state: name -> tensor or DTensor to fill.
        checkpoint: a committed checkpoint of any store, or the local folder of one that no marker names.

    Raises:
        DamagedCheckpoint: what is read of a committed checkpoint is not what was committed.
        CheckpointError: a tensor is not in the checkpoint, or has another shape; the index holds something
            unexpected; a folder without digests cannot be read.
    """
    storage = reader(checkpoint)
    folder = storage.folder
    index = storage.read_metadata().state_dict_metadata
    missing = sorted(name for name in state if name not in index)
    if missing:
        raise CheckpointError(
            f"{folder.name} lacks {len(missing)} of {len(state)} tensors, the first {missing[0]!r}: it belongs to another model "
            "or optimizer; start from its weights only (leave 'optimizer' out of carry) or use a matching spec"
        )
    for name, tensor in state.items():
        if tuple(index[name].size) != tuple(tensor.shape):
            raise CheckpointError(f"{name!r} has shape {tuple(index[name].size)} in {folder.name}, this model has {tuple(tensor.shape)}")
    with read_errors(folder), raise_cause():
        dcp.load(state, storage_reader=storage)
    for name in state:
        parts = [_part(name, part) for part in ADAPTER_PARTS]
        if parts[0] in index and parts[0] not in state:
            adapter = {part: torch.empty(index[part].size, device=state[name].device) for part in parts}
            with read_errors(folder), raise_cause():
                dcp.load(adapter, storage_reader=storage, no_dist=True)  # stages of a pipeline have adapters of their own
            merge_adapter(state[name], *adapter.values())


def _part(weight: str, part: str) -> str:
    """Name of a part of the adapter of a weight, `X.weight` -> `X.lora_a.weight`; no tensor's name for what
    is not a weight."""
    return f"{weight.removesuffix('weight')}{part}"
