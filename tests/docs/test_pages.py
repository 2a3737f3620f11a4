"""The pages keep their promises: length, links, and examples that are recipes."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from specs.recipe import load
from specs.stages import STAGES

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/own_data/README.md"))]


def words(*pages: Path) -> int:
    return sum(len(page.read_text().split()) for page in pages)


def test_the_readme_has_at_most_900_words() -> None:
    assert words(ROOT / "README.md") <= 900


def test_the_pages_have_at_most_25_000_words() -> None:
    by_commands = {"gpu_check.md", "gpu_run.md", "gpu_speed.md", "studies.md", "test_all.md"}
    written = [page for page in (ROOT / "docs").glob("*.md") if page.name not in by_commands]
    assert words(*written) <= 25_000


def test_the_glossary_has_at_most_40_entries_in_order() -> None:
    entries = re.findall(r"^\| ([a-z][^|]*?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.M)[1:]
    assert len(entries) <= 40
    assert entries == sorted(entries)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_has_every_kind_of_stage_once() -> None:
    table = (ROOT / "README.md").read_text().partition("## Kinds of stages")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(STAGES)


def test_the_small_recipe_of_the_page_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "recipe.md").read_text()
    (text,) = re.findall(r"^    name: tiny\n(?:(?:    .*)?\n)+", page, re.M)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(dedent(text))
    assert list(load(recipe).stages) == ["tokenizer", "corpus", "main", "pretrain", "export"]
