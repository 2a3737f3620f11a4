"""`python -m apertus_model.rehearsal TASK REPORT`: both files of JSON, see `records`.

The report also states a failure; the exit code is 0 when there is a report.
"""

import functools
import os
import sys
import traceback
from pathlib import Path

from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.records import RankFailure, RankReport, RankTask
from infra.imports import quick_imports


def main(task_file: str, report_file: str) -> int:
    """Rehearses, and writes the report."""
    task = RankTask.model_validate_json(Path(task_file).read_text())
    os.environ |= {
        "RANK": str(task.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(task.world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    try:
        prepare(task.device, task.gpu)
        from apertus_model.rehearsal import patches
        from apertus_model.rehearsal.step import rehearse

        kept = patches.fused_operators() if task.device == "cuda" and task.fused_norms else None
        report = RankReport(rank=task.rank, rehearsed=rehearse(task))
        del kept
    except Exception as error:
        if os.environ.get("APERTUS_DEBUG"):
            traceback.print_exc()
        report = RankReport(rank=task.rank, failure=_failure(error))
    Path(report_file).write_text(report.model_dump_json())
    return 0


@functools.cache
def prepare(device: str, gpu: str) -> None:
    """Applies the patches of a rehearsal on this kind of GPU, and imports what the rehearsal needs.
    NoFakeCuda without a compiler that works; MissingTarget when a name that is replaced or used does not
    exist."""
    if device == "cuda" and "torch" not in sys.modules:
        fake_cuda.load()
    with quick_imports():
        import torch

        from apertus_model.rehearsal import patches
        from apertus_model.rehearsal.rates import Rates

    if device == "cuda":
        patches.apply(patches.cuda(Rates(gpu, gpus_per_node=1), torch.Stream(device="cuda:0")))
    patches.check(patches.USED)
    with quick_imports():
        import apertus_model.rehearsal.step  # noqa: F401


def _failure(error: Exception) -> RankFailure:
    places = [
        f"{frame.filename[frame.filename.rindex(part) + 1 :]}:{frame.lineno}"
        for part in ("/apertus_model/", "/torchtitan/")
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if part in frame.filename and "/rehearsal/" not in frame.filename
    ]
    return RankFailure(error=f"{type(error).__name__}: {error}", place=places[0] if places else "")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
