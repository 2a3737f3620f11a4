"""Reads YAML 1.2 files as plain values, each with the place where it was written.

Invariants: `1e-4` is a number, `12:30` is text, `yes` is text. A repeated key is an error. Reading builds
only dicts, lists and scalars; no tag makes an object. The origin of a value (file and line, or `--set`) is
kept for the errors.
"""

import copy
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from yaml import AliasEvent, MappingNode, MarkedYAMLError, Node, ScalarNode, SequenceNode, YAMLError
from yaml.composer import Composer
from yaml.cyaml import CParser
from yaml.resolver import BaseResolver

from specs.errors import FieldPath, Problem, SpecError, did_you_mean
from specs.foreign import MAX_DEPTH, read_local, shown
from specs.redaction import mask_url

MAX_BYTES = 4 * 2**20
MAX_VALUES = 100_000
MAX_BITS = 63  # of a whole number, without its sign
SHOWN = 200  # characters of an override that a message shows
SHAPE = "a spec is a mapping with name, sources and stages"
TOO_MANY = f"more than {MAX_VALUES} values; do aliases repeat each other?"
TOO_DEEP = f"brackets or blocks inside each other, more than {MAX_DEPTH}, too deep to read"
TOO_DEEP += "; is an alias inside what it names?"
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_-]*)\}")
_CONSTANTS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_CONSTANTS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass(frozen=True)
class Origin:
    """The place where a value was written."""

    where: str  # `mini.yaml:12`, `--set a.b=1`
    text: str = ""  # of a scalar, as it is written: `1e-4`
    folder: str = ""  # of the file in which the value begins; "" for the current folder


@dataclass
class Document:
    """A YAML file as plain values with origins. Composition (`specs.compose`) fills in the last three
    fields."""

    name: str
    data: dict[str, Any]
    origins: dict[FieldPath, Origin] = field(default_factory=dict)
    variants: dict[str, list[str]] = field(default_factory=dict)  # of each stage with a matrix
    problems: list[Problem] = field(default_factory=list)
    unknown: set[FieldPath] = field(default_factory=set)  # paths without a value because of these problems

    def where(self, path: FieldPath) -> str:
        """Origin of a path or of its nearest known ancestor: `mini.yaml:12`, or `--set ...` for a value that
        was overridden; both if only a part of the value was."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                where = self.origins[path[:end]].where
                parts = [
                    origin.where
                    for known, origin in self.origins.items()
                    if len(known) > end == len(path) and known[:end] == path
                ]
                return ", ".join(
                    dict.fromkeys([where, *(part for part in parts if part.startswith("--set "))])
                )
        return self.name

    def state(self, path: FieldPath, value: Any) -> None:
        """Replaces the value at a path, which keeps its origin."""
        place: Any = self.data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    def overridden(self, path: FieldPath) -> bool:
        """Whether the value at a path came from `--set`."""
        return self.where(path).startswith("--set ")


def read(path: str | Path, shape: str = SHAPE) -> Document:
    """Reads a YAML file. Raises SpecError for a file that cannot be read, is not YAML, repeats a key or is
    not a mapping; `shape`: see `parse`."""
    if "://" in str(path):
        fix = "copy it here, and name the copy."
        raise SpecError.of((), "this is a URL, not a file", fix, mask_url(str(path)))
    if not os.path.exists(path):
        raise SpecError.of((), "there is no such file", nearest_file(Path(path)), str(path))
    try:
        text = read_local(path, MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise SpecError.of((), f"cannot read the file: {error}", where=str(path)) from error
    return parse(text, str(path), shape)


def nearest_file(path: Path, but: Path | None = None) -> str:
    """`did you mean 'mini.yaml'?`, from the files in the folder of a missing file."""
    if not path.parent.is_dir():
        return f"there is no folder '{path.parent}'."
    there = [other.name for other in path.parent.glob("*.yaml") if other != but]
    return did_you_mean(path.name, there) if there else "name an existing file."


def parse(text: str, name: str, shape: str = SHAPE, *, or_nothing: bool = False) -> Document:
    """Reads a YAML text. `name` and `shape`: the file in messages, and what it should be; `or_nothing`: reads
    anything but a mapping as an empty one."""
    try:
        root = _compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        variable = mark is not None and "${" in "".join(text.splitlines()[mark.line : mark.line + 1])
        if "another document" in (error.problem or ""):
            raise SpecError.of(
                (), "a second document begins here", "write one to a file, without another ---.", where
            ) from error
        fix = "check indentation, colons and quotes there."
        if variable:
            fix = 'quote "${...}" inside { } and [ ].'
        raise SpecError.of((), f"not YAML: {error.problem or error}", fix, where) from error
    except YAMLError as error:
        raise SpecError.of((), f"not YAML: {error}", where=name) from error
    except RecursionError as error:
        raise SpecError.of((), TOO_DEEP, where=name) from error
    except OverflowError as error:
        raise SpecError.of((), TOO_MANY, where=name) from error
    if root is None or not isinstance(root, MappingNode):
        if or_nothing:
            return Document(name, {})
        raise SpecError.of((), shape, where=name)
    folder = os.path.dirname(os.path.abspath(name))
    builder = _Builder(lambda node: f"{name}:{node.start_mark.line + 1}", folder)
    data = builder.build(root, ())
    if builder.problems:
        raise SpecError(builder.problems)
    return Document(name, data, builder.origins)


class _Composer(Composer, CParser, BaseResolver):
    """A composer that stops at a file with very many values, which would take minutes to read. A name of an
    alias may be given again."""

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        self.count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.count += 1
        if self.count > 2 * MAX_VALUES:  # keys are nodes as well
            raise OverflowError
        if not self.check_event(AliasEvent):
            self.anchors.pop(self.peek_event().anchor, None)
        return super().compose_node(parent, index)


@lru_cache(16)
def _compose(text: str) -> Node | None:
    """The nodes of a text, which are cached, so nothing may change them. Raises YAMLError, RecursionError, or
    OverflowError for more than `MAX_VALUES` values."""
    try:
        root: Node | None = _Composer(text).get_single_node()
    except UnicodeEncodeError as error:  # half of a character, as in an argument of a command
        raise YAMLError(str(error)) from error
    return root


def scalar(text: str) -> Any:
    """A plain YAML 1.2 scalar as bool, int, float, None or text. Integers may have `_` between digits. Raises
    ValueError for a number that is too large."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    digits = text.replace("_", "")
    if _INT.match(text):
        if len(digits) > MAX_BITS or (number := int(digits)).bit_length() > MAX_BITS:
            raise ValueError(f"{shown(text)} does not fit into 64 bits")
        return number
    if not _FLOAT.match(text):
        return text
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{shown(text)} is too large for a number")
    return value


class _Builder:
    def __init__(self, where: Callable[[Node], str], folder: str = "") -> None:
        self.where = where
        self.folder = folder
        self.origins: dict[FieldPath, Origin] = {}
        self.problems: list[Problem] = []
        self.count = 0

    def build(self, node: Node, path: FieldPath, key: Node | None = None) -> Any:
        """The plain value of a node; a value in a mapping has the origin of its key."""
        where = self.where(key or node)
        self.origins[path] = Origin(where, node.value if isinstance(node, ScalarNode) else "", self.folder)
        self.count += 1
        if self.count > MAX_VALUES:
            raise SpecError.of((), TOO_MANY, where=where)
        if len(path) > MAX_DEPTH:
            raise SpecError.of(path[:3], TOO_DEEP, where=where)
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        try:
            return node.value if node.style else scalar(node.value)
        except ValueError as error:
            self.problems.append(Problem(path, str(error), "write a smaller one.", where))
        return None

    def _mapping(self, node: MappingNode, path: FieldPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in self._merged(node, path, ()):
            if not isinstance(key_node, ScalarNode):
                self.problems.append(Problem(path, "a key must be plain text", where=self.where(key_node)))
                continue
            key = str(key_node.value)
            if key in values:
                message = f"this key is already on line {lines[key]}"
                self.problems.append(
                    Problem((*path, key), message, "keep one of the two.", self.where(key_node))
                )
                continue
            lines[key] = key_node.start_mark.line + 1
            values[key] = self.build(value_node, (*path, key), key_node)
        return values

    def _merged(
        self, node: MappingNode, path: FieldPath, within: tuple[Node, ...]
    ) -> list[tuple[Node, Node]]:
        """The keys and values of a mapping, and those of the mappings under its merge keys (`<<: *name`)
        whose keys neither it nor an earlier one has."""
        self.count += bool(within)
        if self.count > MAX_VALUES or node in within:
            where = self.where(node)
            raise SpecError.of(path[:3], TOO_DEEP if node in within else TOO_MANY, where=where)
        pairs = [pair for pair in node.value if not _is_merge(pair[0])]
        keys = {str(key.value) for key, _ in pairs}
        for key, value in node.value:
            sources = (value.value if isinstance(value, SequenceNode) else [value]) if _is_merge(key) else []
            for source in sources:
                if not isinstance(source, MappingNode):
                    fix = "write <<: *name, or a list of such names."
                    self.problems.append(Problem(path, "<< merges mappings only", fix, self.where(key)))
                    continue
                merged = self._merged(source, path, (*within, node))
                pairs += [pair for pair in merged if str(pair[0].value) not in keys]
                keys |= {str(key.value) for key, _ in merged}
        return pairs


def _is_merge(key: Node) -> bool:
    return isinstance(key, ScalarNode) and key.value == "<<" and not key.style


def keys_of(target: str, stage: str | None) -> list[str]:
    """The keys of a path, `steps[0].budget` or `steps.0.budget`. The name of a stage, which may have dots, is
    one key."""
    target = re.sub(r"\[(\d+)\]", r".\1", target)
    if stage is None:
        return target.split(".")
    return ["stages", stage, *target.removeprefix(f"stages.{stage}").split(".")[1:]]


def override(document: Document, assignment: str, variables: Document | None = None) -> None:
    """Applies one `path=value` of `--set`. Raises SpecError for a malformed assignment, and for a path that
    leads through a value that is not a mapping.

    A path through a mapping that is a variable changes a copy of it, at that place only. `variables`: the
    document that states them, if not `document`. Validation finds out later whether the field exists."""
    masked = mask_url(assignment)
    where = f"--set {masked}" if len(masked) <= SHOWN else f"--set {masked[:SHOWN]}..."
    target, equals, text = assignment.partition("=")
    target = target.strip()
    keys = keys_of(target, stage_of(document, target))
    if not equals or not all(keys):
        raise SpecError.of((), f"{shown(assignment)} is not an assignment", "write path=value.", where)
    builder = _Builder(lambda node: where)
    try:
        node = _compose(text) if text.strip() else None
    except (YAMLError, RecursionError, OverflowError) as error:
        raise SpecError.of((), f"the value {shown(text)} is not YAML", "quote it.", where) from error
    value = builder.build(node, ()) if node is not None else None
    if builder.problems:
        raise SpecError(builder.problems)
    for group, what in (("stages", "stage"), ("variables", "variable")):
        there = document.data.get(group) or {}
        if keys[0] == group and len(keys) > 1 and isinstance(there, dict) and keys[1] not in there:
            fix = did_you_mean(keys[1], [*there, *(document.variants if group == "stages" else ())])
            raise SpecError.of(
                (), f"the override matches nothing: there is no {what} '{keys[1]}'", fix, where
            )
    place: Any = document.data
    path: FieldPath = ()
    for depth, key in enumerate(keys):
        position = int(key) if isinstance(place, list) and key.isdecimal() and int(key) < len(place) else None
        if not isinstance(place, dict) and position is None:
            missing = ".".join(keys[: depth + 1])
            raise SpecError.of((), f"the override matches nothing: there is no '{missing}'", where=where)
        step = key if position is None else position
        path = (*path, step)
        if depth == len(keys) - 1:
            place[step] = value
        else:
            if position is None and place.get(key) is None:
                place[key] = {}
                document.origins[path] = Origin(where)
            if isinstance(place[step], str):
                _copy_variable(document, place, path, variables or document)
            place = place[step]
    for old in [old for old in document.origins if old[: len(path)] == path]:
        del document.origins[old]
    document.origins[path] = Origin(where)
    document.origins |= {(*path, *below): origin for below, origin in builder.origins.items()}


def _copy_variable(document: Document, place: Any, path: FieldPath, variables: Document) -> None:
    """Replaces the variable at `path`, whose last key is in `place`, with a copy of its value, if that is a
    mapping or a list."""
    values = variables.data.get("variables")
    value, followed = place[path[-1]], list[str]()
    while isinstance(value, str) and isinstance(values, dict) and (use := _VARIABLE.fullmatch(value)):
        if use[1] not in values or use[1] in followed:
            return
        followed.append(use[1])
        value = values[use[1]]
    if followed and isinstance(value, (dict, list)):
        place[path[-1]] = copy.deepcopy(value)
        there = [
            (at[2:], origin)
            for at, origin in variables.origins.items()
            if at[:2] == ("variables", followed[-1])
        ]
        document.origins |= {(*path, *below): origin for below, origin in there}


def stage_of(document: Document, target: str) -> str | None:
    """The stage that the path of an override changes; its name may have dots."""
    stages = document.data.get("stages")
    names = stages if isinstance(stages, dict) else ()
    return max((name for name in names if f"{target}.".startswith(f"stages.{name}.")), key=len, default=None)
