"""Reads what a stage prints on another machine: its reports and its lines.

Invariant: an incomplete report is a line like any other.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import TypeAdapter

from specs.job import REPORT, Failure, ProgressRow

REPORTS: TypeAdapter[ProgressRow | Failure] = TypeAdapter(ProgressRow | Failure)


class LogReader:
    """A reader that takes the reports out of a log: progress rows go to `on_progress`, the error to `error`,
    all other lines to `on_line`."""

    def __init__(self, on_line: Callable[[str], None], on_progress: Callable[[ProgressRow], None]) -> None:
        self._on_line = on_line
        self._on_progress = on_progress
        self.error: Failure | None = None

    def line(self, text: str) -> None:
        report = _report(text)
        if report is None:
            self._on_line(text)
        elif isinstance(report, Failure):
            self.error = report
        else:
            self._on_progress(report)


def _report(text: str) -> ProgressRow | Failure | None:
    """The report in a line; None for a line that is no report, or a torn one."""
    if not text.startswith(REPORT):
        return None
    try:
        return REPORTS.validate_json(text.removeprefix(REPORT))
    except ValueError:
        return None
