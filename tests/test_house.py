"""What keeps the house readable: kinds are asked and not told apart, functions fit on a page, and values have
the names of what they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from specs import stages
from specs.stages.base import Part, Stage

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    path for folder in ("specs", "flows", "apertus_model", "infra") for path in (ROOT / folder).rglob("*.py")
]
MOST_TYPE_TESTS = 20
MOST_LINES = 80
NOT_NAMES = {"found", "one", "read", "made", "taken", "stated"}  # of values; fields of classes may be stored


def subclasses(base: type) -> Iterator[str]:
    for cls in base.__subclasses__():
        yield cls.__name__
        yield from subclasses(cls)


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def test_few_places_tell_stages_and_parts_apart_by_their_types() -> None:
    assert stages.STAGES, "imports every kind"
    kinds = {*subclasses(Stage), *subclasses(Part), "Stage", "Part", "Training", "MixtureTraining"}
    type_tests = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path.parent != ROOT / "specs" / "stages"
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and any(isinstance(name, ast.Name) and name.id in kinds for name in ast.walk(node.args[1]))
    ]
    assert len(type_tests) <= MOST_TYPE_TESTS, "state the fact on the kind:\n" + "\n".join(type_tests)


def test_functions_fit_on_a_page() -> None:
    long = [
        f"{path.relative_to(ROOT)} {node.name}: {node.end_lineno - node.lineno + 1}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MOST_LINES
    ]
    assert long == []


def test_values_are_named_after_what_they_are() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for scope in nodes(path)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.comprehension)
        for node in ast.walk(scope)
        if (isinstance(node, ast.Name) and node.id in NOT_NAMES and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.arg) and node.arg in NOT_NAMES)
    ]
    assert named == [], "name it after what it is"
