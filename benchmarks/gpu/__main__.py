"""Training speed on one GPU, beside torchtitan's own trainer, a bare loop around transformers, and the limit
of the card: `python -m benchmarks.gpu`.

Writes a record in JSON and a page into a folder; without a GPU, it trains tiny shapes, and writes them only
if a folder is named. Nothing is downloaded. With a torch that is older than torchtitan needs, see
`benchmarks.gpu.older_torch`; the record has the versions.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.records import RankTask as Rehearsal
from benchmarks.gpu.profile import predicted
from benchmarks.gpu.race import Gpu, Race, gpu, tasks_of
from benchmarks.gpu.records import Record, Row, page
from benchmarks.gpu.shapes import Task, shapes, tiny
from flows.execution.rehearsal import run_ranks
from infra.store.writing.attempt import installed_versions
from specs.cluster import known_gpu
from specs.errors import StageError
from tools.gpu_check import PACKAGES, nvidia_smi
from tools.record import commit

NAME = "gpu_speed"  # of the record and the page
REHEARSAL = 90.0  # seconds that are kept for rehearsals
REHEARSED = ("ours, eager", "ours, compiled", "ours, float8")
CPU_MEMORY = 64e9  # bytes; all tiny contenders of a shape form a group
ASSUMED = "H100"  # GPU of the rehearsals where there is none


def machine(device: Gpu | None) -> dict[str, str]:
    """What the machine is."""
    facts = {"GPU": "none"}
    if device is not None:
        capability = ".".join(map(str, device.capability))
        facts = {"GPU": f"{device.name}, {device.memory / 1e9:.1f} GB, compute capability {capability}"}
        if device.older_torch:
            facts["weights of torchtitan"] = "cast by autocast: this torch is older than its FSDP needs"
        facts |= nvidia_smi("driver_version", "power.limit", "clocks.max.sm")
    return facts | installed_versions(PACKAGES)


def rehearse(tasks: list[Task], rows: dict[Task, Row], name: str, device: str) -> None:
    """Adds predictions to the profiles of our trainer."""
    ours = [task for task in tasks if task.contender.name in REHEARSED and rows[task].profile]
    asked = [
        Rehearsal(
            kind="pretrain", segment=task.segment.model_dump(mode="json"), world_size=1, rank=0, gpu=name,
            gpus_per_node=8, device=device,
        )
        for task in ours
    ]  # fmt: skip
    for task, report in zip(ours, run_ranks(asked), strict=True):
        if report.rehearsed is not None:
            rows[task].predicted = predicted(report.rehearsed)


def compare(arguments: argparse.Namespace) -> tuple[Record, list[Task]]:
    """Measures, and returns the record, and the tasks of its rows."""
    begin = time.monotonic()
    device = None if arguments.tiny else gpu()
    small, capability = device is None, device and device.capability
    chosen = [shape for shape in shapes() if arguments.shape in (None, shape.name)]
    tasks, left_out = tasks_of([tiny(shape) if small else shape for shape in chosen], capability)
    sheet = device and known_gpu(device.name, device.memory)
    seconds = 60 * arguments.minutes - (time.monotonic() - begin) - REHEARSAL * arguments.profile
    race = Race(tasks, left_out, seconds, small)
    race.run(
        CPU_MEMORY if device is None else device.memory, arguments.rounds, arguments.passes, arguments.profile
    )
    for task, row in race.rows.items():
        if sheet and row.rounds:
            row.share_of_peak = task.share_of_peak(row.median, sheet)
    if arguments.profile and (small or (sheet and fake_cuda.possible())):
        try:
            rehearse(tasks, race.rows, sheet or ASSUMED, "cpu" if small else "cuda")
        except StageError as error:  # what was measured is written all the same
            print(f"there are no predictions: {error}", file=sys.stderr)
    record = Record(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        commit=commit(),
        machine=machine(device),
        seconds=time.monotonic() - begin,
        rows=[*race.rows.values()],
    )
    return record, tasks


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="after which the command ends")
    parser.add_argument("--rounds", type=int, default=3, help="of each contender in a group")
    parser.add_argument("--passes", type=int, default=2, help="over all groups, while there is time")
    parser.add_argument("--shape", choices=[shape.name for shape in shapes()], help="only this one")
    parser.add_argument("--profile", action="store_true", help="seconds by class, beside a rehearsal")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, as without a GPU")
    parser.add_argument("--out", type=Path, help="folder of record and page; docs where there is a GPU")
    arguments = parser.parse_args()
    if arguments.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    record, tasks = compare(arguments)
    text = page(record, tasks)
    sys.stdout.write(text)
    folder = arguments.out or (Path("docs") if record.machine["GPU"] != "none" else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{NAME}.md").write_text(text)
        (folder / f"{NAME}.json").write_text(record.model_dump_json(indent=1) + "\n")


if __name__ == "__main__":
    main()
