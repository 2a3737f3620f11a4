"""Progress where there is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.cli.live import Plain
from specs.job import ProgressRow


def test_lines_of_progress_come_every_few_seconds_and_the_last_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("flows.cli.live.time.monotonic", lambda: now[0])
    lines = Plain(Console(file=io.StringIO(), color_system=None))
    for seconds, done in ((0, 1), (1, 2), (60, 3), (61, 4), (62, 4)):
        now[0] = 100.0 + seconds
        lines.progress("sft", ProgressRow(done=done, total=4, unit="steps"))
    output = lines.console.file.getvalue()  # type: ignore[attr-defined]
    assert output.splitlines() == ["sft: steps 1/4", "sft: steps 3/4", "sft: steps 4/4"]
