"""Where the tasks of a stage run: in processes of this machine, or as a Slurm job array. What they write is the same."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from apertus_model.data.slurm import run_array
from apertus_model.data.workers import Tasks, run_tasks
from apertus_model.progress import TaskProgress
from apertus_model.stop import StopSignal
from specs.launch import Launch, Slurm

if TYPE_CHECKING:
    from apertus_model.data.conversation_tasks import ConversationTasks
    from apertus_model.data.tokenise import CorpusTasks


class Finished(Protocol):
    """A task that is done: files that it wrote, by name, and what it counted."""

    @property
    def files(self) -> dict[str, Path]: ...

    @property
    def counts(self) -> dict[str, Any]: ...


def execute(
    work: CorpusTasks | ConversationTasks, ranks: list[int], launch: Launch, stop: StopSignal, progress: TaskProgress
) -> Generator[tuple[int, Finished], None, None]:
    """Runs the tasks and yields each with its rank when it is done. The first error of a task is raised here; the others are stopped, as
    they are when the generator is closed."""
    if launch.executor == "slurm":
        yield from run_array(work, ranks, launch.slurm or Slurm(), stop, progress)
    else:
        tasks: Tasks[Finished] = work
        yield from run_tasks(tasks, ranks, launch.workers or 2)
