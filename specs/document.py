"""YAML 1.2 files with positions: plain values, and the line of every one of them.

Invariants: `1e-4` is a number, `12:30` is text, `yes` is text. A repeated key is an error. Reading builds only dicts, lists and
scalars; no tag makes an object. Sources of a value (file and line, or `--set`) are kept for the errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from specs.errors import FieldPath, Problem, SpecError, nearest

MAX_VALUES = 100_000
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_CONSTANTS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_CONSTANTS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass
class Document:
    """`data` are the plain values; `lines` says where each path stands; `overridden` are the paths that came from `--set`."""

    name: str
    data: dict[str, Any]
    lines: dict[FieldPath, int] = field(default_factory=dict)
    overridden: dict[FieldPath, str] = field(default_factory=dict)

    def assignment(self, path: FieldPath) -> str | None:
        """The `--set` that made the value at a path: its own, an ancestor's, or one below it that had to make it first."""
        for made, text in self.overridden.items():
            if path[: len(made)] == made or (made[: len(path)] == path and path not in self.lines):
                return text
        return None

    def where(self, path: FieldPath) -> str:
        """`mini.yaml:12` for the nearest known ancestor of a path, `--set ...` for a value that came from there."""
        assignment = self.assignment(path)
        if assignment is not None:
            return f"--set {assignment}"
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return f"{self.name}:{self.lines[path[:end]]}"
        return self.name


def read(path: str | Path) -> Document:
    """Reads a YAML file. SpecError for one that cannot be read, is not YAML, repeats a key or is not a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem((), f"cannot read the spec: {error}", where=str(path))]) from error
    return parse(text, str(path))


def parse(text: str, name: str) -> Document:
    """The same for a text; `name` is what errors call it."""
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise SpecError(
            [Problem((), f"not YAML: {error.problem or error}", "check indentation, colons and quotes there.", where)]
        ) from error
    except YAMLError as error:
        raise SpecError([Problem((), f"not YAML: {error}", where=name)]) from error
    if root is None or not isinstance(root, MappingNode):
        raise SpecError([Problem((), "a spec is a mapping with name, sources and stages", where=name)])
    builder = _Builder(name)
    data = builder.build(root, ())
    if builder.problems:
        raise SpecError(builder.problems)
    return Document(name, data, builder.lines)


def scalar(text: str) -> Any:
    """A plain YAML 1.2 scalar as bool, int, float, None or text. Integers may have `_` between digits."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.match(text):
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if _FLOAT.match(text) else text


class _Builder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[FieldPath, int] = {}
        self.problems: list[Problem] = []
        self.count = 0

    def build(self, node: Node, path: FieldPath) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self.count += 1
        if self.count > MAX_VALUES:
            raise SpecError([Problem((), f"more than {MAX_VALUES} values; do aliases repeat each other?", where=f"{self.name}:{line}")])
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return scalar(node.value) if node.style is None else node.value

    def _mapping(self, node: MappingNode, path: FieldPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                self.problems.append(Problem(path, "a key must be plain text", where=f"{self.name}:{line}"))
                continue
            key = str(key_node.value)
            if key in values:
                first = self.lines[(*path, key)]
                fix = "keep one of the two."
                self.problems.append(Problem((*path, key), f"this key stands on line {first} already", fix, f"{self.name}:{line}"))
                continue
            self.lines[(*path, key)] = line
            values[key] = self.build(value_node, (*path, key))
        return values


def override(document: Document, assignment: str) -> None:
    """Applies one `path=value` of `--set`. SpecError for a malformed one or one that goes through something that is not a mapping.

    Whether the field exists is found by the validation that follows, which knows the models."""
    target, equals, text = assignment.partition("=")
    keys = target.strip().split(".")
    if not equals or not all(keys):
        raise SpecError([Problem((), f"'{assignment}' is not an assignment", "write path=value.", f"--set {assignment}")])
    try:
        node = YAML(typ="safe", pure=True).compose(text) if text.strip() else None
    except YAMLError as error:
        raise SpecError([Problem((), f"the value '{text}' is not YAML", "quote it.", f"--set {assignment}")]) from error
    value = _Builder("--set").build(node, ()) if node is not None else None
    place: Any = document.data
    stages = document.data.get("stages")
    if keys[0] == "stages" and len(keys) > 1 and isinstance(stages, dict) and keys[1] not in stages:
        fix = nearest(keys[1], stages)
        raise SpecError([Problem((), f"the override matches nothing: there is no stage '{keys[1]}'", fix, f"--set {assignment}")])
    for depth, key in enumerate(keys):
        position = int(key) if isinstance(place, list) and key.isdigit() and int(key) < len(place) else None
        if not isinstance(place, dict) and position is None:
            missing = ".".join(keys[: depth + 1])
            raise SpecError([Problem((), f"the override matches nothing: there is no '{missing}'", where=f"--set {assignment}")])
        if depth == len(keys) - 1:
            place[key if position is None else position] = value
        elif position is not None:
            place = place[position]
        else:
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
    document.overridden[tuple(int(key) if key.isdigit() else key for key in keys)] = assignment
