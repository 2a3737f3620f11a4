"""Recipes name the source of a number in brackets. Every mark is one that the file, or a file that it extends
or names, declares at its beginning, and a place in the Apertus report is one that the report has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "specs" / "recipes"
FILES = sorted(RECIPES.rglob("*.yaml"))
MARK = re.compile(r"\[(\?|[A-Z0-9]*[A-Z][A-Z0-9]*)\]")
REPORT = "2509.14233"

# The report's own numbers of its parts: sections with subsections, tables, figures, notes.
SECTIONS = {"1": 0, "2": 6, "3": 4, "4": 4, "5": 6, "6": 3, "7": 0}
SUBSECTIONS = {"3.1": 3, "3.2": 5, "4.1": 4, "4.2": 1, "4.3": 2, "5.4": 2, "5.5": 2, "6.1": 2, "6.3": 6}
APPENDICES = {"H": 3, "J": 5, "L": 2, "M": 2, "N": 2} | dict.fromkeys("ABCDEFGIKOP", 0)
PLACES = {
    *SECTIONS,
    *APPENDICES,
    *(
        f"{part}.{index}"
        for part, count in {**SECTIONS, **SUBSECTIONS, **APPENDICES}.items()
        for index in range(1, count + 1)
    ),
}
NUMBERED = {
    "table": {*map(str, range(1, 29)), "B.1", "B.2", "B.3", "C.4", "F.5", "G.6", "H.7", "H.8", "J.9", "J.10"},
    "figure": {*map(str, range(1, 14)), "D.1", "E.2", "F.3", "J.4"},
    "note": {*map(str, range(1, 61))},
}
CITED = re.compile(
    r"\[P\],? (?:(?P<kind>table|figure|note) (?P<number>[A-Z]?\.?\d+)"
    r"|(?:section |appendix )?(?P<place>\d(?:\.\d+)+|\d(?= )|[A-P](?:\.\d+)?)(?!\w|[.,]\d))"
)


def comments(path: Path) -> list[str]:
    return [
        found[1] for line in path.read_text().splitlines() if (found := re.search(r"(?:^|\s)#(.*)", line))
    ]


def head(path: Path) -> str:
    """The comment at the beginning of a file."""
    lines = path.read_text().splitlines()
    return "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])


def declared_in(path: Path) -> Iterator[Path]:
    """A file, what it extends, and what its head names."""
    yield path
    extends = re.findall(r"^extends: (\S+)", path.read_text(), re.M)
    for other in {*extends, *re.findall(r"as in (shared/\S+\.yaml)", head(path))}:
        yield from declared_in(path.parent / other)


def marks(path: Path) -> set[str]:
    return {mark for comment in comments(path) for mark in MARK.findall(comment)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_mark_of_a_recipe_is_declared(path: Path) -> None:
    declared = {mark for file in declared_in(path) for mark in MARK.findall(head(file))}
    assert marks(path) <= declared
    assert not [comment for comment in comments(path) if re.search(r"\[[A-Z0-9]+[,;:/ ]", comment)]


def test_every_declared_mark_is_used_and_says_what_it_stands_for() -> None:
    shared = RECIPES / "shared" / "apertus.yaml"
    lines = [line for line in head(shared).splitlines() if line.startswith("#   [")]
    declared = MARK.findall("\n".join(lines))
    assert len(declared) == len(set(declared)) > 10
    below = shared.read_text().removeprefix(head(shared))
    users = [path.read_text() for path in FILES if shared in declared_in(path) and path != shared]
    assert set(declared) == set(MARK.findall("\n".join([below, *users])))
    stated = re.sub(r"\[(\w+)\]\s+(?=\[)", "", "\n".join(lines))  # two marks of one source
    for text in MARK.split(stated)[2::2]:
        assert re.search(r"swiss-ai/|arXiv|follows|not published", text), text


def test_places_in_the_report_exist() -> None:
    cited = [
        found
        for path in FILES
        if any(REPORT in head(file) for file in declared_in(path))
        for found in CITED.finditer(" ".join(comment.strip() for comment in comments(path)))
    ]
    assert len(cited) > 40
    for found in cited:
        known = NUMBERED[found["kind"]] if found["kind"] else PLACES
        assert (found["number"] or found["place"]) in known, found[0]


def test_the_page_declares_the_marks_of_its_tables() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    (sentence,) = re.findall(r"^A test compares this page.*?\.$", page, re.M | re.S)
    tool = (ROOT / "tools" / "published.py").read_text()
    assert set(MARK.findall(page)) | set(MARK.findall(tool)) == set(MARK.findall(sentence))
