"""One task of a stage, on a node: `python -m apertus_model.data.array_task ARRAY.json FIRST`, as element of a
Slurm job array.

It writes `<rank>.json` beside the given file: its files and counts, or its error.

Invariants:
- The result appears whole, and after the files that it names. A task that Slurm restarts writes to another
  folder.
- A task whose stage is gone ends, when `alive` has not changed for `lost_seconds`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from infra.liveness import FileSilence
from specs.errors import StageError

SPECIFICATION = "array.json"
ALIVE = "alive"


class ArrayTasks(BaseModel):
    """The specification of the tasks of an array."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str  # name of the class of the stage's tasks
    work: dict[str, Any]  # fields of that class
    ranks: list[int]  # the task of each element of the array
    cpus: int  # per task
    lost_seconds: float  # a task ends when `alive` has not changed for this long


def result_file(folder: Path, rank: int) -> Path:
    """The path of the result of a task."""
    return folder / f"{rank:05d}.json"


def main(specification: Path, first: int) -> int:
    """Runs the task that the environment names; returns 0, or 1 after an error."""
    array = ArrayTasks.model_validate_json(specification.read_text())
    folder, rank = specification.parent, array.ranks[first + int(os.environ["SLURM_ARRAY_TASK_ID"])]
    os.environ |= {
        "TOKENIZERS_PARALLELISM": "true" if array.cpus > 1 else "false",
        "RAYON_NUM_THREADS": str(array.cpus),
    }
    threading.Thread(target=_leave_with_stage, args=(folder / ALIVE, array.lost_seconds), daemon=True).start()
    own = folder / f"{rank:05d}-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    own.mkdir()
    result: dict[str, Any]
    try:
        done = _tasks(array.kind, array.work)._replace(folder=own).run(rank)
        files = {
            name: {"path": str(path.relative_to(folder)), "size": path.stat().st_size}
            for name, path in done.files.items()
        }
        result = {"files": files, "counts": done.counts}
    except Exception as error:
        traceback.print_exc()
        known = isinstance(error, StageError)
        result = {"error": str(error) if known else f"{type(error).__name__}: {error}", "again": not known}
    partial = own / "result.json"
    partial.write_text(json.dumps(result))
    os.replace(partial, result_file(folder, rank))
    return 1 if "error" in result else 0


def _tasks(kind: str, fields: dict[str, Any]) -> Any:
    """The tasks of a stage, from their fields."""
    if kind == "CorpusTasks":
        from apertus_model.data.tokenise import CorpusTasks

        return TypeAdapter(CorpusTasks).validate_python(fields)
    from apertus_model.data.conversation_tasks import ConversationTasks

    assert kind == "ConversationTasks"
    return TypeAdapter(ConversationTasks).validate_python(fields)


def _leave_with_stage(alive: Path, lost_seconds: float) -> None:
    stage = FileSilence(alive)
    while stage.seconds() < lost_seconds:
        time.sleep(min(5.0, lost_seconds / 10))
    print(f"no sign of life of the stage for {lost_seconds:g} s: this task ends", flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
