"""Composing pipeline files: `extends`, `variables` and `matrix`, from what is written to the plain document that is checked.

Invariants: what comes out has none of the three in it, and every value in it knows where it was written: the file and line, or the
`--set`, and the variable where there is one. All works on structure alone; what the fields mean is known to the models only. What cannot
be composed is noted in the document with its place, so that the checks that follow report it together with all the rest.

The order: files are merged, overrides applied, stages with a matrix expanded, variables filled in.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specs.document import MAX_VALUES, Document, Origin, override, read, stage_of
from specs.errors import FieldPath, Problem, SpecError, nearest

MAX_VARIANTS = 1000
MAX_DEPTH = 50
LISTS_OF_STAGES = ("after", "checkpoints", "evaluations")
"""Fields whose lists may name a matrix stage, for all of its variants."""
_USE = re.compile(r"\$\$\{|\$\{(?P<name>[^{}$]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_LABEL = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class _Value:
    """A value with its origin: `content` is a scalar, a list of `_Value`, or a mapping of text to `_Value`. Never changed in place."""

    content: Any
    origin: Origin

    def without(self, key: str) -> _Value:
        return replace(self, content={name: item for name, item in self.content.items() if name != key})


def compose(path: str | Path, overrides: Iterable[str] = ()) -> Document:
    """The composed document of a file. SpecError for files that cannot be read; other problems stand in the document."""
    return expand(extended(path), overrides)


def keywords(path: FieldPath) -> tuple[str, ...]:
    """What may stand at a path of a file beside the fields of the models."""
    if not path:
        return ("extends", "variables")
    return ("matrix",) if path[0] == "stages" and len(path) == 2 else ()


def distinct(document: Document, problems: Iterable[Problem]) -> list[Problem]:
    """The problems of composing and those that were found later: none of a value that is not known, and one of a kind where the variants
    of a stage share a mistake."""
    stage = {variant: name for name, made in document.variants.items() for variant in made}
    known = [problem for problem in problems if not any(problem.path[: len(path)] == path for path in document.unknown)]
    first: dict[Any, Problem] = {}
    for problem in [*document.problems, *known]:
        path = problem.path
        if path[:1] == ("stages",) and len(path) > 1:
            path = ("stages", stage.get(str(path[1]), path[1]), *path[2:])
        first.setdefault((path, problem.where, problem.message, problem.fix), problem)
    return list(first.values())


# extends


def extended(path: str | Path) -> Document:
    """A file merged over the file that it extends, and so on. SpecError for one that cannot be read, and for a cycle."""
    files, documents = [Path(path)], [read(path)]
    while "extends" in documents[-1].data:
        file, document = files[-1], documents[-1]
        at: FieldPath = ("extends",)
        stated, where = document.data.pop("extends"), document.where(at)
        if not isinstance(stated, str) or not stated:
            raise SpecError([Problem(at, f"{stated!r} is not a file", "name one file, relative to this one.", where)])
        base = file.parent / stated
        if not os.path.isfile(base):
            there = [other.name for other in base.parent.glob("*.yaml") if other != file] if base.parent.is_dir() else []
            raise SpecError([Problem(at, f"there is no file '{base}'", nearest(base.name, there), where)])
        for index, other in enumerate(files):
            if os.path.samefile(base, other):
                cycle = " -> ".join(str(one) for one in [*files[index:], base])
                raise SpecError([Problem(at, f"the files extend each other: {cycle}", "let one of them stand alone.", where)])
        files.append(base)
        documents.append(read(base))
    problems: list[Problem] = []
    root = _tree(documents.pop())
    while documents:
        root = _merge(root, _tree(documents.pop()), (), problems)
    merged = _document(str(path), root)
    merged.problems = problems
    return merged


def _merge(base: _Value, over: _Value, path: FieldPath, problems: list[Problem]) -> _Value:
    """`over` wins; mappings are merged key by key, and null removes a key that `base` has."""
    if not isinstance(base.content, dict) or not isinstance(over.content, dict):
        return over
    merged = dict(base.content)
    for key, item in over.content.items():
        if item.content is not None:
            merged[key] = _merge(merged[key], item, (*path, key), problems) if key in merged else item
        elif key in merged:
            del merged[key]
        elif path in (("stages",), ("sources",)):
            what = str(path[0]).removesuffix("s")
            fix = nearest(key, base.content)
            problems.append(Problem((*path, key), f"there is no {what} '{key}' that could be removed", fix, item.origin.where))
        else:
            merged[key] = item
    return _Value(merged, over.origin)


# overrides, matrix, variables


def expand(document: Document, overrides: Iterable[str] = ()) -> Document:
    """The document of one merged file with overrides applied, stages with a matrix expanded and variables filled in."""
    problems, of_variants = list(document.problems), []
    for assignment in overrides:
        if assignment.startswith("stages.") and stage_of(document, assignment.partition("=")[0].strip()) is None and _matrices(document):
            of_variants.append(assignment)  # by its own name a variant exists only when the matrix is expanded
        else:
            problems += _override(document, assignment)
    if "extends" in document.data:
        where = document.where(("extends",))
        problems.append(Problem(("extends",), "files are merged before overrides are applied", "state it in the file.", where))
        del document.data["extends"]
    root = _tree(document)
    variables = _Variables(root.content.get("variables"))
    variants: dict[str, list[str]] = {}
    stages = root.content.get("stages")
    if stages is not None and isinstance(stages.content, dict):
        matrices = _Matrices(variables, stages)
        variants = matrices.variants
        root = replace(root, content=root.content | {"stages": replace(stages, content=matrices.expanded())})
    raw = _document(document.name, root.without("variables"))
    raw.variants = variants
    for assignment in of_variants:
        problems += _override(raw, assignment)
    texts = [*_texts(root), *of_variants, *(_texts(stages) if stages is not None else ())]
    composed = _document(document.name, _lists_of_stages(variables.fill(_tree(raw), ()), variants))
    composed.variants = variants
    composed.problems = [*problems, *variables.problems, *variables.unused(texts, document.name)]
    composed.unknown = variables.unknown
    return composed


def _override(document: Document, assignment: str) -> list[Problem]:
    try:
        override(document, assignment)
    except SpecError as error:
        return error.problems
    return []


def _matrices(document: Document) -> list[str]:
    stages = document.data.get("stages")
    return [name for name, stage in stages.items() if isinstance(stage, dict) and "matrix" in stage] if isinstance(stages, dict) else []


class _Variables:
    """The variables of a file. `fill` puts them into a value; what cannot be filled in stays as it is, with its path in `unknown`."""

    def __init__(self, stated: _Value | None) -> None:
        self.problems: list[Problem] = []
        self.unknown: set[FieldPath] = set()
        self.labels: dict[str, str] = {}  # what ${matrix} is, by stage
        self._stated: dict[str, _Value] = {}
        self._values: dict[str, _Value | None] = {}
        self._open: list[str] = []
        self._size = 0
        if stated is None or stated.content is None:
            return
        if not isinstance(stated.content, dict):
            self.problem(("variables",), "variables are a mapping of names to values", "write for example {lr: 1e-4}.", stated)
            return
        for name, value in stated.content.items():
            if name == "matrix":
                self.problem(("variables", name), "${matrix} is the name of the variant in a stage with a matrix", "rename it.", value)
            elif not _VARIABLE.fullmatch(name):
                self.problem(("variables", name), f"'{name}' is not a name", "use letters, digits, _ and -, a letter first.", value)
            if name != "matrix":
                self._stated[name] = value
        for name in self._stated:
            self._resolved(name)

    def problem(self, path: FieldPath, message: str, fix: str, at: _Value | Origin) -> None:
        """Notes a problem with the value at `path`, which from now on is not known."""
        origin = at.origin if isinstance(at, _Value) else at
        self.problems.append(Problem(path, message, fix, origin.where))
        self.unknown.add(path)

    def unused(self, texts: Iterable[str], file: str) -> list[Problem]:
        """Variables that the file itself, or an override, states and nothing uses; inherited ones need no use."""
        used = {match["name"] for text in texts for match in _USE.finditer(text)}
        return [
            Problem(("variables", name), "nothing uses this variable", f"remove it, or write ${{{name}}} where it is meant.", where)
            for name, value in self._stated.items()
            if name not in used and ((where := value.origin.where).startswith("--set ") or where.rpartition(":")[0] == file)
        ]

    def fill(self, value: _Value, path: FieldPath) -> _Value:
        """A value with its variables filled in."""
        content = value.content
        self._count(value.origin, len(content) // 100 if isinstance(content, str) else 0)
        if isinstance(content, list):
            return replace(value, content=[self.fill(item, (*path, index)) for index, item in enumerate(content)])
        if isinstance(content, dict):
            filled: dict[str, _Value] = {}
            for stated, item in content.items():
                key = self.text(stated, (*path, stated), item.origin)
                if key in filled:
                    self.problem((*path, key), f"two keys are '{key}' when their variables are filled in", "keep one.", item)
                else:
                    filled[key] = self.fill(item, (*path, key))
            return replace(value, content=filled)
        if not isinstance(content, str) or "${" not in content:
            return value
        alone = _USE.fullmatch(content)
        if alone and alone["name"] is not None:
            found = self._lookup(alone["name"], path, value.origin)
            return value if found is None else self._moved(found, value.origin, alone["name"])
        text = self.text(content, path, value.origin)
        names = [match["name"] for match in _USE.finditer(content) if match["name"] in self._stated]
        where = value.origin.where + "".join(f" ({name} from {self._stated[name].origin.where})" for name in dict.fromkeys(names))
        return _Value(text, Origin(where, text))

    def text(self, text: str, path: FieldPath, origin: Origin) -> str:
        """A text with the variables inside it filled in, as they are written."""
        if "${" not in text:
            return text
        if "${" in _USE.sub("", text):
            self.problem(path, f"'{text}' has a ${{ that is not closed", "write ${name} for a variable, $${ for the text itself.", origin)
            return text
        filled, end = "", 0
        for match in _USE.finditer(text):
            filled += text[end : match.start()]
            end = match.end()
            if match["name"] is None:
                filled += "${"
                continue
            found = self._lookup(match["name"], path, origin)
            if found is None:
                return text
            if isinstance(found.content, (list, dict)):
                what = "list" if isinstance(found.content, list) else "mapping"
                self.problem(path, f"the variable '{match['name']}' is a {what}", "let it stand alone, without text around it.", origin)
                return text
            filled += _written(found)
        filled += text[end:]
        self._count(origin, len(filled) // 100)
        return filled

    def _lookup(self, name: str, path: FieldPath, origin: Origin) -> _Value | None:
        label = self.labels.get(str(path[1])) if path[:1] == ("stages",) and len(path) > 1 else None
        if name == "matrix" and label is not None:
            return _Value(label, replace(origin, text=label))
        if name == "matrix":
            self.problem(path, "${matrix} is known inside a stage with a matrix only", "name the variant that is meant.", origin)
        elif name not in self._stated and ("variables",) not in self.unknown:
            names = [*self._stated, *([] if label is None else ["matrix"])]
            self.problem(path, f"there is no variable '{name}'", nearest(name, names), origin)
        elif name in self._stated and (found := self._resolved(name)) is not None:
            return found
        self.unknown.add(path)
        return None

    def _resolved(self, name: str) -> _Value | None:
        """The value of a variable, None for one that is wrong."""
        if name in self._values:
            return self._values[name]
        path, stated = ("variables", name), self._stated[name]
        if name in self._open or len(self._open) == MAX_DEPTH:
            chain = " -> ".join([*self._open[self._open.index(name) if name in self._open else 0 :], name])
            message = f"the variables form a cycle: {chain}" if name in self._open else f"more than {MAX_DEPTH} variables use each other"
            self.problem(path, message, "state one of them without the others.", stated)
            return None
        self._open.append(name)
        value: _Value | None = self.fill(stated, path)
        self._open.pop()
        if any(wrong[:2] == path for wrong in self.unknown):
            value = None
        self._values[name] = value
        return value

    def _moved(self, value: _Value, place: Origin, name: str) -> _Value:
        """A variable's value where it is used: its origin names both places."""
        self._count(place)
        content = value.content
        if isinstance(content, list):
            content = [self._moved(item, place, name) for item in content]
        elif isinstance(content, dict):
            content = {key: self._moved(item, place, name) for key, item in content.items()}
        where = place.where if name == "matrix" else f"{place.where} ({name} from {value.origin.where})"
        return _Value(content, replace(value.origin, where=where))

    def _count(self, origin: Origin, extra: int = 0) -> None:
        self._size += 1 + extra
        if self._size > MAX_VALUES:
            raise _too_large(origin)


class _Matrices:
    """The stages of a file with those that have a matrix replaced by their variants; `variants` are the names that each became."""

    def __init__(self, variables: _Variables, stages: _Value) -> None:
        self.variables = variables
        self.variants: dict[str, list[str]] = {}
        self._stages: dict[str, _Value] = {}
        self._size = 0
        for stated, stage in stages.content.items():
            name = variables.text(stated, ("stages", stated), stage.origin)
            if name in self._stages:
                variables.problem(("stages", name), f"two stages are named '{name}'", "rename one of the two.", stage)
            self._stages[name] = stage

    def expanded(self) -> dict[str, _Value]:
        """All stages, each variant at the place of its stage. Variables inside the variants are not filled in yet."""
        expanded: dict[str, _Value] = {}
        for name, stage in self._stages.items():
            if not isinstance(stage.content, dict) or "matrix" not in stage.content:
                expanded[name] = stage
                continue
            before, rest = len(self.variables.unknown), stage.without("matrix")
            made = self._variants(name, stage.content["matrix"], rest)
            if made:
                self.variants[name] = list(made)
                self._check_overrides(name, rest, made)
            else:  # the stage stays under its own name, so that nothing else is said about it and what refers to it
                made, self.variables.labels[name] = {name: rest}, name
            if len(self.variables.unknown) > before:
                self.variables.unknown |= {("stages", variant) for variant in made}
            expanded |= made
        return expanded

    def _variants(self, name: str, matrix: _Value, rest: _Value) -> dict[str, _Value]:
        """The variants of a stage by their names; `rest` is the stage without its matrix."""
        path: FieldPath = ("stages", name, "matrix")
        made: dict[str, _Value] = {}
        for at, label, place, body in self._stated(path, self._filled_text(matrix, path), rest):
            if self._is_name(at, name, label, place, made) and self._is_flat(at, place, body):
                self._size += sum(1 for _ in _nodes(body))
                if self._size > MAX_VALUES:
                    raise _too_large(place.origin)
                made[f"{name}-{label}"] = body
                self.variables.labels[f"{name}-{label}"] = label
        return made

    def _stated(self, path: FieldPath, matrix: _Value, rest: _Value) -> Iterator[tuple[FieldPath, str, _Value, _Value]]:
        """Path, label, place and fields of every variant, in one of the three forms."""
        content = matrix.content
        if path in self.variables.unknown:
            return
        if content in ([], {}):
            self.variables.problem(path, "the matrix is empty, so there is no stage", "list a variant, or remove the stage.", matrix)
        elif isinstance(content, list):
            for index, item in enumerate(content):
                item = self._filled(item, (*path, index))
                yield (*path, index), _written(item), item, rest
        elif not isinstance(content, dict):
            message = "a matrix is a list of names, a mapping of names to the fields that they change, or of fields to lists of values"
            self.variables.problem(path, message, "write [a, b], {a: {seed: 1}, b: {seed: 2}} or {seed: [1, 2]}.", matrix)
        else:
            fields = {key: self._filled_text(item, (*path, key)) for key, item in content.items()}
            if all(isinstance(item.content, list) for item in fields.values()):
                for label, body in self._grid(path, fields, rest):
                    yield path, label, matrix, body
            elif all(isinstance(item.content, dict) or item.content is None for item in fields.values()):
                for key, item in fields.items():
                    changes = replace(item, content=item.content or {})
                    label = self.variables.text(key, (*path, key), item.origin)
                    yield (*path, key), label, item, _merge(rest, changes, (), [])
            elif not any((*path, key) in self.variables.unknown for key in fields):
                message = "a matrix has either names with the fields that they change, or fields with lists of values"
                self.variables.problem(path, message, "write {a: {seed: 1}, b: {seed: 2}} or {seed: [1, 2]}.", matrix)

    def _grid(self, path: FieldPath, fields: dict[str, _Value], rest: _Value) -> Iterator[tuple[str, _Value]]:
        """Label and body of every combination of values, the last field changing fastest."""
        for key, values in fields.items():
            if not values.content:
                self.variables.problem((*path, key), "there is no value in this list", "list at least one.", values)
            elif not all(key.split(".")):
                self.variables.problem((*path, key), f"'{key}' is not the path of a field", "write for example optimizer.lr.", values)
            elif (wrong := _not_mapping(rest, key.split(".")[:-1])) is not None:
                self.variables.problem((*path, key), f"there is no field '{key}': '{wrong}' is not a mapping", "change that one.", values)
            elif any(key.startswith(f"{other}.") for other in fields):
                self.variables.problem((*path, key), "the matrix sets this field and the whole of which it is a part", "keep one.", values)
        count = math.prod(len(values.content) for values in fields.values())
        if count > MAX_VARIANTS:
            values = next(iter(fields.values()))
            self.variables.problem(path, f"a matrix of {count} stages; {MAX_VARIANTS} are allowed", "shorten its lists.", values)
            return
        filled = [[self._filled(item, (*path, key, index)) for index, item in enumerate(values.content)] for key, values in fields.items()]
        for combination in itertools.product(*filled):
            body = rest
            for key, item in zip(fields, combination, strict=True):
                body = _with(body, key.split("."), item)
            yield "-".join(re.sub(r"[^A-Za-z0-9_.-]+", "_", _written(item)).strip("_") or "_" for item in combination), body

    def _filled(self, value: _Value, path: FieldPath) -> _Value:
        """A part of a matrix that has to be known before the stage is expanded, in a form that filling in once more leaves alone."""
        return _literal(self.variables.fill(value, path))

    def _filled_text(self, value: _Value, path: FieldPath) -> _Value:
        return self._filled(value, path) if isinstance(value.content, str) else value

    def _is_name(self, path: FieldPath, name: str, label: str, place: _Value, made: Mapping[str, _Value]) -> bool:
        full = f"{name}-{label}"
        if not _LABEL.fullmatch(label):
            if path not in self.variables.unknown:
                self.variables.problem(path, f"'{label}' is not a name", "use letters, digits, _, . and -.", place)
        elif full in made:
            self.variables.problem(path, f"two variants are named '{full}'", "keep one, or give them names.", place)
        elif full in self._stages or any(full in others for others in self.variants.values()):
            self.variables.problem(path, f"the variant's name '{full}' is that of another stage", "rename one of the two.", place)
        else:
            return True
        return False

    def _is_flat(self, path: FieldPath, place: _Value, body: _Value) -> bool:
        if "matrix" not in body.content:
            return True
        self.variables.problem(path, "a matrix inside a matrix", "list more fields in one matrix.", place)
        return False

    def _check_overrides(self, name: str, rest: _Value, made: Mapping[str, _Value]) -> None:
        """An override of the stage that every variant replaces by its own value matches nothing."""
        reached = {node.origin.where for body in made.values() for node in _nodes(body)}
        for where in dict.fromkeys(node.origin.where for node in _nodes(rest)):
            if where.startswith("--set ") and where not in reached:
                message = f"the override matches nothing: every variant of '{name}' states that field itself"
                fix = f"set it in stages.{name}.matrix, or of one variant, for example {next(iter(made))}."
                self.variables.problems.append(Problem((), message, fix, where))


def _lists_of_stages(root: _Value, variants: Mapping[str, list[str]]) -> _Value:
    """In lists of stages, the name of one with a matrix stands for all its variants."""

    def all_of(item: _Value) -> list[_Value]:
        names = variants.get(item.content, [item.content]) if isinstance(item.content, str) else []
        return [replace(item, content=name) for name in names] or [item]

    def named(stage: _Value) -> _Value:
        if not isinstance(stage.content, dict):
            return stage
        lists = {
            field: replace(value, content=[name for item in value.content for name in all_of(item)])
            for field, value in stage.content.items()
            if field in LISTS_OF_STAGES and isinstance(value.content, list)
        }
        return replace(stage, content=stage.content | lists)

    stages = root.content.get("stages")
    if not variants or stages is None or not isinstance(stages.content, dict):
        return root
    stages = replace(stages, content={name: named(stage) for name, stage in stages.content.items()})
    return replace(root, content=root.content | {"stages": stages})


# Values with their origins


def _tree(document: Document) -> _Value:
    def value(data: Any, path: FieldPath) -> _Value:
        origin = document.origins.get(path) or Origin(document.where(path))
        if isinstance(data, dict):
            return _Value({key: value(item, (*path, key)) for key, item in data.items()}, origin)
        if isinstance(data, list):
            return _Value([value(item, (*path, index)) for index, item in enumerate(data)], origin)
        return _Value(data, origin)

    return value(document.data, ())


def _document(name: str, root: _Value) -> Document:
    origins: dict[FieldPath, Origin] = {}

    def plain(value: _Value, path: FieldPath) -> Any:
        origins[path] = value.origin
        if isinstance(value.content, dict):
            return {key: plain(item, (*path, key)) for key, item in value.content.items()}
        if isinstance(value.content, list):
            return [plain(item, (*path, index)) for index, item in enumerate(value.content)]
        return value.content

    return Document(name, plain(root, ()), origins)


def _nodes(value: _Value) -> Iterator[_Value]:
    yield value
    for item in value.content.values() if isinstance(value.content, dict) else value.content if isinstance(value.content, list) else ():
        yield from _nodes(item)


def _texts(value: _Value) -> Iterator[str]:
    """Every text in a value, keys included."""
    for node in _nodes(value):
        if isinstance(node.content, dict):
            yield from node.content
        elif isinstance(node.content, str):
            yield node.content


def _written(value: _Value) -> str:
    """A value as it is written in the file: 1e-4 stays 1e-4."""
    if isinstance(value.content, str):
        return value.content
    if isinstance(value.content, list):
        return f"[{', '.join(map(_written, value.content))}]"
    if isinstance(value.content, dict):
        return f"{{{', '.join(f'{key}: {_written(item)}' for key, item in value.content.items())}}}"
    return value.origin.text or json.dumps(value.content)


def _literal(value: _Value) -> _Value:
    """The value that becomes this one when its variables are filled in."""
    content = value.content
    if isinstance(content, str):
        content = content.replace("${", "$${")
    elif isinstance(content, list):
        content = [_literal(item) for item in content]
    elif isinstance(content, dict):
        content = {key.replace("${", "$${"): _literal(item) for key, item in content.items()}
    return replace(value, content=content)


def _with(value: _Value, keys: list[str], item: _Value) -> _Value:
    """A mapping with one field, at the end of `keys`, set."""
    if not keys:
        return item
    fields = value.content if isinstance(value.content, dict) else {}
    return replace(value, content=fields | {keys[0]: _with(fields.get(keys[0], _Value({}, item.origin)), keys[1:], item)})


def _not_mapping(value: _Value, keys: list[str]) -> str | None:
    """The first of the fields on the way along `keys` that can have no fields of its own."""
    for depth, key in enumerate(keys):
        if not isinstance(value.content, dict) or key not in value.content:
            return None
        value = value.content[key]
        if value.content is not None and not isinstance(value.content, dict):
            return ".".join(keys[: depth + 1])
    return None


def _too_large(origin: Origin) -> SpecError:
    return SpecError([Problem((), f"more than {MAX_VALUES} values; do matrices or variables repeat each other?", where=origin.where)])
