"""Progress of a stage."""

from __future__ import annotations

from pathlib import Path

from apertus_model.progress import Progress
from specs.job import ProgressRow


def test_the_first_row_and_the_last_one_are_always_written(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    progress = Progress(file, interval=3600)
    for step in (1, 2, 3):
        progress.update(step, 3, "steps", loss=1 / step)
    rows = [ProgressRow.model_validate_json(line) for line in file.read_text().splitlines()]
    assert rows == [
        ProgressRow(done=step, total=3, unit="steps", metrics={"loss": 1 / step}) for step in (1, 3)
    ]
