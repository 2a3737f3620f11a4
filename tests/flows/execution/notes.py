"""Who watches a run."""

from __future__ import annotations

from typing import Any

from flows.planning.plan import Step


class Notes:
    """An observer that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, step: Step) -> None: ...
    def line(self, name: str, text: str) -> None: ...
    def note(self, name: str, text: str) -> None:
        self.notes.append(f"{name}: {text}")

    def progress(self, name: str, row: dict[str, Any]) -> None: ...
    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None: ...
