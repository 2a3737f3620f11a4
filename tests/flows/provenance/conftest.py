"""Branches of the tiny recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.provenance.branch import Branch, branch
from infra.store import Store
from tests.recipes import CHAT, write_recipe


@pytest.fixture
def branched(recipe: Path, store: Store) -> Callable[..., Branch]:
    """`branched("pretrain@step=12", "a.b=c", ...)`: a branch `other` of the tiny recipe."""

    def run(point: str, *overrides: str, name: str = "other") -> Branch:
        return branch(str(recipe), point, name, overrides, store=store.url)

    return run


@pytest.fixture
def chat(tmp_path: Path, store: Store) -> Path:
    return write_recipe(tmp_path, CHAT)
