"""The tests of a folder are found by its name: those of `flows/report` are in `tests/flows/report`. A test
file has the name of a module there, or of a behaviour."""

from __future__ import annotations

import sys
from pathlib import Path

from specs.stages import STAGES

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("specs", "apertus_model", "flows", "infra")


def folders(root: Path, files: str) -> set[Path]:
    """The folders of the four packages below a root that have such files."""
    paths = [path for package in PACKAGES for path in (root / package).rglob(files)]
    return {path.parent.relative_to(root) for path in paths if path.name != "__init__.py"}


def test_every_folder_has_its_tests_in_the_folder_of_its_name() -> None:
    assert folders(ROOT, "*.py") - folders(ROOT / "tests", "test_*.py") == set()


def test_every_folder_of_tests_is_named_like_what_it_tests() -> None:
    assert folders(ROOT / "tests", "test_*.py") - folders(ROOT, "*") == set()


def test_no_module_has_the_name_of_one_of_the_standard_library() -> None:
    kinds = set(STAGES)  # their modules have their names, `select` among them
    files = [path for folder in (*PACKAGES, "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    assert {path.stem for path in files} & sys.stdlib_module_names - kinds - {"__init__", "__main__"} == set()
