"""What a stage tells by the log of its pod."""

from __future__ import annotations

import json
from pathlib import Path

from infra.launchers.pod_log import LogReader
from specs.job import REPORT, Failure, ProgressRow
from tests.infra.launchers.pretended import Pretended, a_kubernetes_job, stamped


def test_lines_rows_and_errors_come_out_of_the_log(cluster: Pretended, tmp_path: Path) -> None:
    row, failure = ProgressRow(done=1, total=2, unit="steps"), Failure(message="no")
    output = [
        "first",
        f"{REPORT}{row.model_dump_json()}",
        f"{REPORT}{failure.model_dump_json()}",
        f'{REPORT}{{"done": 2, "to',
        "last",
    ]
    cluster.say("Failed", ends="Failed", logs=stamped(output))
    lines: list[str] = []
    told: list[ProgressRow] = []
    ended = a_kubernetes_job(tmp_path).run(lines.append, told.append)
    assert (ended.code, ended.error, ended.requeue, told) == (1, failure, "", [row])
    shown = ["first", output[3], "last"]  # a torn report is a line
    assert lines[1:] == shown and (tmp_path / "log.txt").read_text().splitlines() == shown
    assert [call.split()[1] for call in cluster.calls if call.startswith("delete")] == [
        "job",
        "service",
        "configmap",
    ]
    applied = json.loads((cluster.folder / "applied.json").read_text())
    assert [item["kind"] for item in applied["items"]] == ["ConfigMap", "Service", "Job"]


def test_lines_hold_no_secret_and_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    lines: list[str] = []
    failure = Failure(message='refused: {"Authorization": "Token ***', again=True)
    reader = LogReader(lines.append, print, tmp_path / "log.txt")
    reader.line(f"{REPORT}{failure.model_dump_json()}")
    reader.line("GET https://h/x?sig=abc failed")
    assert reader.error == failure
    assert lines == list(reader.tail) == ["GET https://h/x?sig=*** failed"]
    assert (tmp_path / "log.txt").read_text() == "GET https://h/x?sig=*** failed\n"


def test_a_line_comes_once_however_often_the_connection_ends(cluster: Pretended, tmp_path: Path) -> None:
    """Two lines are of one second, which is as exact as what can be asked for; of one only the beginning
    comes at first."""
    output = [f"line {number}" for number in range(6)]
    text = stamped(output)
    ends = [index + 1 for index, letter in enumerate(text) if letter == "\n"]
    cluster.say(
        *["Running"] * 20,
        "Succeeded",
        ends="Complete",
        logs=text,
        cuts=[0, ends[0], ends[0], ends[2], ends[3] - 3, ends[4]],
    )
    lines: list[str] = []
    assert a_kubernetes_job(tmp_path).run(lines.append, print).code == 0
    assert lines[1:] == output
    assert sum(call.startswith("logs") for call in cluster.calls) > 6
