"""Training speed on one GPU, beside torchtitan's own trainer, a bare loop around transformers, and the limit
of the card: `python -m benchmarks.gpu`.

Writes a record in JSON and a page into a folder, after each group of contenders, so that what was measured is
kept if the command is stopped. Without a GPU, it trains tiny shapes, and writes only if a folder is named.
Nothing is downloaded. A machine whose torch cannot rehearse leaves the predictions to another one, which
needs no GPU: `python -m benchmarks.gpu --predict docs/gpu_speed.json`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from apertus_model.rehearsal.records import RankTask
from benchmarks.gpu.profile import predicted
from benchmarks.gpu.race import Race
from benchmarks.gpu.records import Record, page
from benchmarks.gpu.shapes import shapes, tiny, trials
from flows.execution.rehearsal import run_ranks
from specs.errors import StageError
from tools.gpu_check import Device, first_gpu, machine
from tools.record import stamp

NAME = "gpu_speed"  # of the record and the page
CPU_MEMORY = 64e9  # bytes; all tiny contenders of a shape form a group
ASSUMED = "H100"  # GPU of the rehearsals where there is none
MISSING = "not predicted"  # name of the fact


def rehearse(record: Record) -> None:
    """Adds predictions to the profiles of our trainer, and to the facts why some are missing."""
    record.machine.pop(MISSING, None)
    chosen = [shape if record.sheet else tiny(shape) for shape in shapes()]
    every = [trial for shape in chosen for trial in trials(shape)]
    ours = {(trial.shape.name, trial.name): trial for trial in every if trial.kind == "ours"}
    rows = [row for row in record.rows if row.profile and (row.shape, row.contender) in ours]
    if not rows and any(row.profile for row in record.rows):
        record.machine[MISSING] = "no data sheet of this GPU, or none of our trainers was profiled"
        return
    asked = [
        RankTask(
            kind="pretrain", segment=ours[row.shape, row.contender].segment.model_dump(mode="json"),
            world_size=1, rank=0, gpu=record.sheet or ASSUMED, gpus_per_node=1,
            device="cuda" if record.sheet else "cpu",
        )
        for row in rows
    ]  # fmt: skip
    try:
        reports = run_ranks(asked)
    except StageError as error:
        record.machine[MISSING] = str(error)
        return
    for row, report in zip(rows, reports, strict=True):
        if report.rehearsed is not None:
            row.predicted = predicted(report.rehearsed)
        elif report.failure is not None:
            record.machine[MISSING] = report.failure.error


def write(record: Record, file: Path | None) -> None:
    """Writes the record to a file, and its page beside it, if there is one."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(record.model_dump_json(indent=1) + "\n")
        file.with_suffix(".md").write_text(page(record))


def measure(gpu: Device | None, arguments: argparse.Namespace, file: Path | None) -> Record:
    """Measures, and writes after each group."""
    begin, sheet = time.monotonic(), gpu and gpu.sheet
    chosen = [shape for shape in shapes() if arguments.shape in (None, shape.name)]
    entries = [trial for shape in chosen for trial in trials(shape if gpu else tiny(shape))]
    race = Race(entries, gpu and gpu.capability, 60 * arguments.minutes)
    rows = [*race.rows.values()]
    record = Record(made=stamp(), machine=machine(), sheet=sheet, seconds=0.0, rows=rows)
    for _ in race.run(gpu.memory if gpu else CPU_MEMORY, arguments.profile):
        for trial, row in race.rows.items():
            if sheet and row.rounds:
                row.share_of_peak = trial.share_of_peak(row.median, sheet)
        record.seconds = time.monotonic() - begin
        write(record, file)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.partition("\n\n")[0]
    )
    names = [shape.name for shape in shapes()]
    parser.add_argument("--minutes", type=float, default=6.5, help="of measuring; rehearsals come after")
    parser.add_argument("--shape", choices=names, help="only this one")
    parser.add_argument("--profile", action="store_true", help="seconds by class, beside a rehearsal")
    parser.add_argument("--out", type=Path, help="folder of record and page; docs for all shapes on a GPU")
    parser.add_argument("--predict", type=Path, help="rehearses only, for the profiles of this record")
    arguments = parser.parse_args()
    if arguments.predict is not None:
        file, record = arguments.predict, Record.model_validate_json(arguments.predict.read_text())
    else:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own_process:
            gpu = own_process.submit(first_gpu).result()
        folder = arguments.out or (Path("docs") if gpu and arguments.shape is None else None)
        file = folder / f"{NAME}.json" if folder else None
        record = measure(gpu, arguments, file)
    rehearse(record)
    write(record, file)
    sys.stdout.write(page(record))


if __name__ == "__main__":
    main()
