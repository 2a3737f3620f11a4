"""The pages of `docs/` that tools write are what the tools would write now."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tools import advice

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "tool"), [("advice.md", advice)])
def test_a_checked_in_page_is_what_its_tool_writes(page: str, tool: ModuleType) -> None:
    assert (DOCS / page).read_text() == tool.markdown(), f"run: python -m {tool.__name__} > docs/{page}"
