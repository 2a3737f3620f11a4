"""What a stage on another machine tells by its output."""

from __future__ import annotations

from infra.launchers.log_reader import LogReader
from specs.job import REPORT, Failure, ProgressRow


def test_lines_rows_and_errors_come_out_of_the_log() -> None:
    row, failure = ProgressRow(done=1, total=2, unit="steps"), Failure(message="no")
    reports = [f"{REPORT}{report.model_dump_json()}" for report in (row, failure)]
    torn = f'{REPORT}{{"done": 2, "to'
    lines: list[str] = []
    told: list[ProgressRow] = []
    reader = LogReader(lines.append, told.append)
    for line in ("first", *reports, torn, "last"):
        reader.line(line)
    assert (reader.error, told) == (failure, [row])
    assert lines == ["first", torn, "last"]
