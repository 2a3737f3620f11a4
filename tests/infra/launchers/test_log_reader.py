"""What a stage on another machine tells by its output."""

from __future__ import annotations

from pathlib import Path

from infra.launchers.log_reader import LogReader
from specs.job import REPORT, Failure, ProgressRow


def test_lines_rows_and_errors_come_out_of_the_log(tmp_path: Path) -> None:
    row, failure = ProgressRow(done=1, total=2, unit="steps"), Failure(message="no")
    reports = [f"{REPORT}{report.model_dump_json()}" for report in (row, failure)]
    torn = f'{REPORT}{{"done": 2, "to'
    lines: list[str] = []
    told: list[ProgressRow] = []
    reader = LogReader(lines.append, told.append, tmp_path / "log.txt")
    for line in ("first", *reports, torn, "last"):
        reader.line(line)
    assert (reader.error, told) == (failure, [row])
    assert lines == ["first", torn, "last"] == (tmp_path / "log.txt").read_text().splitlines()


def test_lines_hold_no_secret_and_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    lines: list[str] = []
    failure = Failure(message='refused: {"Authorization": "Token ***', again=True)
    reader = LogReader(lines.append, print, tmp_path / "log.txt")
    reader.line(f"{REPORT}{failure.model_dump_json()}")
    reader.line("GET https://h/x?sig=abc failed")
    assert reader.error == failure
    assert lines == list(reader.tail) == ["GET https://h/x?sig=*** failed"]
    assert (tmp_path / "log.txt").read_text() == "GET https://h/x?sig=*** failed\n"
