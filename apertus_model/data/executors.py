"""Execution of the tasks of a stage, in processes of this machine or as a Slurm job array, with the same
results.

Invariant: a finished task is committed at once as a unit of the store, and a task whose unit exists does not
run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from apertus_model.data.job_array import run_array
from apertus_model.data.rows import spans, unit_key
from apertus_model.data.workers import Tasks, run_tasks
from apertus_model.progress import Progress, TaskProgress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from infra.store.inputs import list_source
from specs.launch import Launch, SlurmTask
from specs.profiles import Profile
from specs.stages.base import SourcePart

if TYPE_CHECKING:
    from apertus_model.data.conversation_tasks import ConversationTasks
    from apertus_model.data.tokenise import CorpusTasks


class Finished(Protocol):
    """The result of a task: its files by name, and its counts."""

    @property
    def files(self) -> dict[str, Path]: ...

    @property
    def counts(self) -> dict[str, Any]: ...


class CommittedTask(NamedTuple):
    """A task whose unit is in the store."""

    files: dict[str, Path]  # local paths, content checked
    counts: dict[str, Any]


def files_of_tasks(part: SourcePart, what: str) -> dict[str, list[str]]:
    """The files of each task, by the key of its unit. A source with a limit is one task: only that can count
    its documents."""
    listing = part.listing or [file.path for file in list_source(part.source).files]
    size = len(listing) if part.source.limit else part.files_per_task
    return {unit_key(what, span): listing[slice(*span)] for span in spans(len(listing), size)}


def commit_tasks(
    work: CorpusTasks | ConversationTasks,
    keys: list[str],
    attempt: Attempt,
    stop: StopSignal,
    progress: Progress,
) -> list[CommittedTask]:
    """Runs the tasks without a unit in the store, and commits each when it is done. Returns all tasks,
    by rank. `keys`: those of the units, by rank."""
    pending = [rank for rank, key in enumerate(keys) if attempt.unit(key) is None]
    advance = TaskProgress(progress, len(keys), len(pending))
    launch, profile = attempt.job.launch, attempt.job.profile
    with contextlib.closing(execute(work, pending, launch, profile, stop, advance)) as results:
        for rank, result in results:
            attempt.commit_unit(keys[rank], files=result.files, data=result.counts)
            for path in result.files.values():
                path.unlink()
            advance.one_more()
    units = {key: attempt.committed_unit(key) for key in keys}
    return [CommittedTask(attempt.unit_files(key, unit), unit.data) for key, unit in units.items()]


def execute(
    work: CorpusTasks | ConversationTasks,
    ranks: list[int],
    launch: Launch,
    profile: Profile,
    stop: StopSignal,
    progress: TaskProgress,
) -> Generator[tuple[int, Finished], None, None]:
    """Runs the tasks and yields each with its rank when it is done. The first error of a task is raised here;
    the others are stopped then, and when the generator is closed."""
    if launch.executor == "slurm":
        yield from run_array(work, ranks, launch.slurm or SlurmTask(), profile.slurm, stop, progress)
    else:
        tasks: Tasks[Finished] = work
        yield from run_tasks(tasks, ranks, launch.workers or 2)
