"""A whole pipeline with its store on a filesystem without hard links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.conftest import SMOKE, Run
from tests.e2e.test_smoke import result

NO_LINKS = """
import errno, os

def link(source, target, **options):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source), None, str(target))

os.link = link
"""


@pytest.mark.slow
def test_the_smoke_recipe_has_the_same_results_without_hard_links(
    finished: Path, home: Path, api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_LINKS)  # imported by every Python that has this path
    path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    store = tmp_path / "store"
    run = Run(home, "run", SMOKE, "--store", str(store), api=api)
    assert run.wait() == 0, run.text
    assert result(store) == result(finished)
    assert [path.name for path in store.rglob(".tmp*")] == []
