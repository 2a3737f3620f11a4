"""Saves and loads the training state. The store decides what is a checkpoint.

torchtitan's own manager chooses the checkpoint to load by itself, leaves the optimizer out of the last
checkpoint, and deletes old ones in a thread. This one loads the one checkpoint it was given, saves everything
each time, and hands a complete folder to the store, which commits and prunes. A save copies the state to host
memory while training waits; a thread with its own process group then writes the copy.

Invariants:
- A checkpoint holds tensors only: parameters, optimizer state, and the step. Learning rate, weight decay,
  betas and the position in the data come from the spec and the step, never from a checkpoint.
- A folder is committed only when every rank has written its part. At most one save is in progress: the next
  one waits for it.
- A failed save ends the run with an error, at the next step at the latest. No run ends before its last save
  is committed.
- All readers of weights use `load_tensors`, so none of them leaves out the adapters of a model.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER, ModelWrapper

from apertus_model.model.lora import ADAPTER_PARTS, is_adapter, merge_adapter
from apertus_model.model.output import REWARD_HEAD
from apertus_model.trainer.anomalies import AnomalyState
from apertus_model.trainer.checkpoint_reader import CheckpointError, CheckpointReader, read_errors
from apertus_model.trainer.checkpoint_writer import CheckpointWriter, Records, StagedPlan, Staging
from infra.store import Checkpoint
from specs.trainable import fits

logger = logging.getLogger(__name__)

STEP = "progress.step"
# For the collectives of a save, in which ranks wait for the slowest one. `HangWatch` watches training.
UPLOAD_TIMEOUT = timedelta(days=1)


class UploadError(RuntimeError):
    """A checkpoint was not stored."""


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint to load, and how to load it."""

    checkpoint: Checkpoint
    step: int  # the step that the checkpoint must be of
    optimizer: bool  # whether to load the optimizer's state too
    # True: the stored adapters become part of the weights, and the model's own adapters and the head of a
    # reward model, if any, keep their initial values. False: the model continues with the stored ones.
    new_adapters: bool = False
    new_parameters: Sequence[str] = ()  # patterns of other parameters that keep their initial values


@dataclass(frozen=True)
class Saved:
    """A checkpoint that all ranks have written."""

    step: int
    files: Records
    stall_seconds: float  # how long training waited for the copy, on rank 0
    upload_seconds: float  # how long writing took

    @property
    def bytes(self) -> int:
        return sum(record.size for record in self.files.values())


Commit = Callable[[Saved], None]


class CheckpointStorage(Protocol):
    """The place where the checkpoints of a run are stored."""

    def writer(self, step: int) -> CheckpointWriter:
        """The writer of a step's checkpoint."""

    def prepare_commit(self, step: int, anomalies: AnomalyState, objective: Mapping[str, Any]) -> Commit:
        """Called on rank 0 when the state of a step is copied, to collect the facts that are known then. The
        function that it returns commits the checkpoint; a thread calls it when all ranks have written."""

    def committed(self, step: int) -> Checkpoint:
        """The committed checkpoint of a step of this run."""

    def timed(self) -> AbstractContextManager[None]:
        """Measures work that training waits for."""


class StoreCheckpoints(BaseCheckpointManager):
    """Loads from `Config.source`, and saves at the steps that are due and on request."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        storage: CheckpointStorage
        source: CheckpointSource | None = None  # to begin from; None: initial weights
        due: Callable[[int], bool]  # whether a checkpoint of this step is due

    # the current states of anomaly detector and objective, for the facts of a checkpoint; set by the trainer
    anomalies: Callable[[], AnomalyState] = AnomalyState
    objective: Callable[[], Mapping[str, Any]] = dict

    def __init__(
        self, config: Config, *, model_parts: list[torch.nn.Module], optimizers: Any, **unused: Any
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        self.saved_step: int | None = None
        self._config = config
        self._states = {MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers}
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._group = dist.new_group(backend="gloo", timeout=UPLOAD_TIMEOUT)

    def _state(self, *, step: int, optimizer: bool) -> dict[str, Tensor]:
        """Every tensor of the state by its stored name: the tensors in use, into which loading writes.
        Optimizer states are named after their parameters, so the names of two pipeline stages never collide
        and a checkpoint can be loaded in any layout."""
        state: dict[str, Tensor] = dict(self._states[MODEL].state_dict())
        state[STEP] = torch.tensor(step, dtype=torch.int64)
        if optimizer:
            tensors = self._states[OPTIMIZER].state_dict()
            state |= {f"{OPTIMIZER}.{name}": tensor for name, tensor in tensors.items()}
        return state

    def _load(self, step: int = -1) -> bool:
        """Loads `Config.source`. `step`, torchtitan's own choice, is ignored. Raises what `load_tensors`
        does, and CheckpointError for a checkpoint of another step than the store says."""
        if self._config.source is None:
            return False
        self._read(self._config.source)
        return True

    def restore(self, step: int) -> None:
        """Resets weights and optimizer state to a committed checkpoint of this run; raises what loading
        raises. Collective."""
        self._read(CheckpointSource(self._config.storage.committed(step), step, optimizer=True))

    @torch.no_grad()
    def _read(self, source: CheckpointSource) -> None:
        begin = time.monotonic()
        state = self._state(step=-1, optimizer=source.optimizer)
        for name in list(state):
            new = source.new_adapters and (is_adapter(name) or name == REWARD_HEAD)
            if new or (source.new_parameters and fits(name, source.new_parameters)):
                del state[name]
        with self._config.storage.timed():
            load_tensors(state, source.checkpoint)
        if int(state[STEP]) != source.step:
            raise CheckpointError(
                f"{source.checkpoint.name} holds step {int(state[STEP])}, the store says"
                f" {source.step}: the folder was changed after it was committed; remove the checkpoint from"
                " the store"
            )
        self._states[MODEL].load_state_dict(state)
        if source.optimizer:
            prefix = f"{OPTIMIZER}."
            self._states[OPTIMIZER].load_state_dict(
                {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            )
        logger.info("loaded %s in %.1f s", source.checkpoint.name, time.monotonic() - begin)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Starts a save when a checkpoint is due, or with `last_step`. Returns whether it did. UploadError
        when the previous save failed."""
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
        commit = None
        if chief:
            commit = self._config.storage.prepare_commit(curr_step, self.anomalies(), self.objective())
        self.saved_step = curr_step
        stall = time.perf_counter() - begin
        self.save_future = self._thread.submit(self._upload, curr_step, copies, plan, commit, stall)
        return True

    def _upload(
        self, step: int, copies: dict[str, Tensor], plan: StagedPlan, commit: Commit | None, stall: float
    ) -> None:
        """Writes and commits a checkpoint. Runs in a thread of every rank; collective over `_group`."""
        begin = time.perf_counter()
        writer = self._config.storage.writer(step)
        with raise_cause():
            dcp.save(copies, storage_writer=writer, planner=plan, process_group=self._group)
        if commit is not None:
            commit(Saved(step, writer.records, stall, time.perf_counter() - begin))

    @property
    def failed(self) -> bool:
        """Whether the save in progress has failed on this rank."""
        save = self.save_future
        return save is not None and save.done() and save.exception() is not None

    def _wait_for_saving(self) -> None:
        """Waits for the save in progress. UploadError when it failed."""
        assert self.save_future is not None
        future, self.save_future = self.save_future, None
        if (error := future.exception()) is not None:
            raise UploadError(
                f"the checkpoint of step {self.saved_step} was not stored: {type(error).__name__}: {error}"
            ) from error

    def _maybe_wait_for_staging(self) -> None:
        """Does nothing: staging ends before `_save` returns."""

    def _close(self) -> None:
        """Waits for the save in progress. Logs its failure, unless it was raised before."""
        self._thread.shutdown(wait=True)
        if self.failed:
            assert self.save_future is not None
            logger.error(
                "the checkpoint of step %d was not stored: %s", self.saved_step, self.save_future.exception()
            )
        self.save_future = None


@contextmanager
def raise_cause() -> Iterator[None]:
    """Raises a rank's first error instead of DCP's `CheckpointException`, which is not an `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise next(cause for cause, _ in error.failures.values()) from error


def load_tensors(state: dict[str, Tensor], checkpoint: Checkpoint, *, alone: bool = False) -> None:
    """Reads tensors of a checkpoint into `state`, in place, resharding as needed. Collective where a process
    group exists.

    A weight whose adapter (LoRA) is in the checkpoint and not in `state` becomes the sum of both.

    Args:
        state: name -> tensor or DTensor to fill.
        checkpoint: of any store.
        alone: whether only some of the processes read it; each then reads the index itself.

    Raises:
        DamagedCheckpoint: the data read differ from what was committed.
        CheckpointError: a tensor is not in the checkpoint, or has another shape; a file is not valid.
    """
    storage = CheckpointReader(checkpoint)
    index = storage.read_metadata().state_dict_metadata
    missing = sorted(name for name in state if name not in index)
    if missing:
        raise CheckpointError(
            f"{checkpoint.name} lacks {len(missing)} of {len(state)} tensors, the first {missing[0]!r}: it"
            " belongs to another model or optimizer; start from its weights only (leave 'optimizer' out of"
            " carry) or use a matching spec"
        )
    for name, tensor in state.items():
        if tuple(index[name].size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{name!r} has shape {tuple(index[name].size)} in {checkpoint.name}, this model has"
                f" {tuple(tensor.shape)}"
            )
    with read_errors(checkpoint), raise_cause():
        dcp.load(state, storage_reader=storage, no_dist=alone)
    for name in state:
        # X.weight -> X.lora_a.weight; for a tensor that is not a weight, a name that no tensor has
        parts = [f"{name.removesuffix('weight')}{part}" for part in ADAPTER_PARTS]
        if parts[0] in index and parts[0] not in state:
            adapter = {part: torch.empty(index[part].size, device=state[name].device) for part in parts}
            with read_errors(checkpoint), raise_cause():
                # without collectives: each pipeline stage has different adapters
                dcp.load(adapter, storage_reader=storage, no_dist=True)
            merge_adapter(state[name], *adapter.values())
