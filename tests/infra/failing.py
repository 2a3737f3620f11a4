"""A filesystem whose calls go wrong."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from infra.store import Store
from tests.infra.integrity import quick


class Failing:
    """Makes chosen methods of a filesystem go wrong: before they did their work, after it, or by what they
    give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fs: Any, **faults: Callable[..., Any]) -> None:
        self.calls: list[str] = []
        for name, fault in faults.items():
            monkeypatch.setattr(fs, name, self._wrapped(name, getattr(fs, name), fault))

    def _wrapped(
        self, name: str, method: Callable[..., Any], fault: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            return fault(self.calls.count(name), lambda: method(*arguments, **options))

        return call


def fails_first(times: int, error: Exception | None = None) -> Callable[[int, Callable[[], Any]], Any]:
    def fault(number: int, call: Callable[[], Any]) -> Any:
        if number <= times:
            raise error or OSError(errno.EIO, "injected")
        return call()

    return fault


def answer_is_lost(number: int, call: Callable[[], Any]) -> Any:
    result = call()
    if number == 1:
        raise TimeoutError("injected")
    return result


def elsewhere(tmp_path: Path, **options: Any) -> Store:
    store = Store(
        fsspec.filesystem("memory", skip_instance_cache=True), f"/{tmp_path.name}", retry=quick(**options)
    )
    store.initialise()
    return store
