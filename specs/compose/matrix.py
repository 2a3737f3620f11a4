"""Expands `matrix:`: one stage becomes several variants.

Invariant: a variant is the stage with some fields changed, at the stage's place in the order, and its fields
keep their lines. A list `$name` sets no field, but a variable of the variant: `${name}` inside it.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from specs.compose.values import Value, literal, merge, nodes, too_large, written
from specs.compose.variables import Variables
from specs.document import MAX_VALUES
from specs.errors import FieldPath, Problem

MAX_VARIANTS = 1000
LISTS_OF_STAGES = ("after", "checkpoints", "evaluations")
"""Fields whose lists may name a matrix stage, for all of its variants."""
LABEL = re.compile(r"[A-Za-z0-9_.-]+")


class Matrices:
    """The stages of a file, where each stage with a matrix is replaced by its variants; `variants` has their
    names by stage."""

    def __init__(self, variables: Variables, stages: Value) -> None:
        self.variables = variables
        self.variants: dict[str, list[str]] = {}
        self._stages: dict[str, Value] = {}
        self._size = 0
        for key, stage in stages.content.items():
            name = variables.text(key, ("stages", key), stage.origin)
            if name in self._stages:
                variables.problem(
                    ("stages", name), f"two stages are named '{name}'", "rename one of the two.", stage
                )
            self._stages[name] = stage

    def expanded(self) -> dict[str, Value]:
        """All stages, each variant at the place of its stage. Variables inside the variants are not filled
        in yet."""
        expanded: dict[str, Value] = {}
        for name, stage in self._stages.items():
            if not isinstance(stage.content, dict) or "matrix" not in stage.content:
                expanded[name] = stage
                continue
            before, rest = len(self.variables.unknown), stage.without("matrix")
            variants = self._variants(name, stage.content["matrix"], rest)
            if variants:
                self.variants[name] = list(variants)
                self._check_overrides(name, rest, variants)
            else:  # the stage stays under its own name, so that references to it are not reported as well
                variants, self.variables.own[name] = {name: rest}, {"matrix": Value(name, stage.origin)}
            if len(self.variables.unknown) > before:
                self.variables.unknown |= {("stages", variant) for variant in variants}
            expanded |= variants
        return expanded

    def _variants(self, name: str, matrix: Value, rest: Value) -> dict[str, Value]:
        """The variants of a stage by their names; `rest` is the stage without its matrix."""
        path: FieldPath = ("stages", name, "matrix")
        variants: dict[str, Value] = {}
        matrix = self._filled_text(matrix, path)
        for at, label, place, body in self._stated(path, matrix, rest):
            if self._is_name(at, name, label, place, variants) and self._is_flat(at, place, body):
                self._size += sum(1 for _ in nodes(body))
                if self._size > MAX_VALUES:
                    raise too_large(place.origin)
                listed = [key for key in body.content if key.startswith("$") and key in matrix.content]
                variants[f"{name}-{label}"] = body.without(*listed)
                self.variables.own[f"{name}-{label}"] = {
                    "matrix": Value(label, replace(place.origin, text=label)),
                    **{key[1:]: self.variables.fill(body.content[key], at) for key in listed},
                }
        return variants

    def _stated(
        self, path: FieldPath, matrix: Value, rest: Value
    ) -> Iterator[tuple[FieldPath, str, Value, Value]]:
        """The path, label, place and fields of every variant. A matrix has one of these forms: a list of
        names; names with the fields that they change; fields with lists of values; or the last two together,
        for every combination."""
        content = matrix.content
        if path in self.variables.unknown:
            return
        if content in ([], {}):
            message = "the matrix is empty, so there is no stage"
            self.variables.problem(path, message, "list a variant, or remove the stage.", matrix)
        elif isinstance(content, list):
            for index, item in enumerate(content):
                item = self._filled(item, (*path, index))
                yield (*path, index), written(item), item, rest
        elif not isinstance(content, dict):
            message = (
                "a matrix is a list of names, a mapping of names to the fields that they change, or of fields"
                " to lists of values"
            )
            self.variables.problem(
                path, message, "write [a, b], {a: {seed: 1}, b: {seed: 2}} or {seed: [1, 2]}.", matrix
            )
        else:
            fields = {key: self._filled_text(item, (*path, key)) for key, item in content.items()}
            lists = {key: item for key, item in fields.items() if isinstance(item.content, list)}
            names = {key: item for key, item in fields.items() if key not in lists}
            if all(isinstance(item.content, dict) or item.content is None for item in names.values()):
                for key, item in names.items():
                    changes = replace(item, content=item.content or {})
                    label = self.variables.text(key, (*path, key), item.origin)
                    body = merge(rest, changes, (), [])
                    if not lists:
                        yield (*path, key), label, item, body
                    for of_lists, combined in self._grid(path, lists, body) if lists else ():
                        yield (*path, key), f"{label}-{of_lists}", item, combined
                for label, body in self._grid(path, lists, rest) if not names else ():
                    yield path, label, matrix, body
            elif not any((*path, key) in self.variables.unknown for key in fields):
                message = (
                    "a matrix has names with the fields that they change, and fields with lists of values"
                )
                fix = "write {a: {lr: 1}, b: {lr: 2}}, {seed: [1, 2]}, or both: {a: {}, b: {}, seed: [1, 2]}."
                self.variables.problem(path, message, fix, matrix)

    def _grid(self, path: FieldPath, fields: dict[str, Value], rest: Value) -> Iterator[tuple[str, Value]]:
        """The label and body of every combination of values, the last field changing fastest."""
        for key, values in fields.items():
            if not values.content:
                self.variables.problem((*path, key), "this list is empty", "list at least one value.", values)
            elif not all(key.split(".")):
                message = f"'{key}' is not the path of a field"
                self.variables.problem((*path, key), message, "write for example optimizer.lr.", values)
            elif (wrong := _not_mapping(rest, key.split(".")[:-1])) is not None:
                message = f"there is no field '{key}': '{wrong}' is not a mapping"
                self.variables.problem((*path, key), message, "change that one.", values)
            elif any(key.startswith(f"{other}.") for other in fields):
                message = "the matrix sets this field and a field that contains it"
                self.variables.problem((*path, key), message, "keep one.", values)
        count = math.prod(len(values.content) for values in fields.values())
        if count > MAX_VARIANTS:
            values = next(iter(fields.values()))
            message = f"the matrix makes {count} stages; {MAX_VARIANTS} are allowed"
            self.variables.problem(path, message, "shorten its lists.", values)
            return
        filled = [
            [self._filled(item, (*path, key, index)) for index, item in enumerate(values.content)]
            for key, values in fields.items()
        ]
        for combination in itertools.product(*filled):
            body = rest
            for key, item in zip(fields, combination, strict=True):
                body = _with(body, key.split("."), item)
            yield (
                "-".join(
                    re.sub(r"[^A-Za-z0-9_.-]+", "_", written(item)).strip("_") or "_" for item in combination
                ),
                body,
            )

    def _filled(self, value: Value, path: FieldPath) -> Value:
        """Fills in a part of a matrix that must be known before the stage is expanded. Filling it in again
        changes nothing."""
        return literal(self.variables.fill(value, path))

    def _filled_text(self, value: Value, path: FieldPath) -> Value:
        return self._filled(value, path) if isinstance(value.content, str) else value

    def _is_name(
        self, path: FieldPath, name: str, label: str, place: Value, variants: Mapping[str, Value]
    ) -> bool:
        full = f"{name}-{label}"
        if not LABEL.fullmatch(label):
            if path not in self.variables.unknown:
                self.variables.problem(
                    path, f"'{label}' is not a name", "use letters, digits, _, . and -.", place
                )
        elif full in variants:
            self.variables.problem(
                path, f"two variants are named '{full}'", "keep one, or give them names.", place
            )
        elif full in self._stages or any(full in others for others in self.variants.values()):
            message = f"the variant and another stage are both named '{full}'"
            self.variables.problem(path, message, "rename one of the two.", place)
        else:
            return True
        return False

    def _is_flat(self, path: FieldPath, place: Value, body: Value) -> bool:
        if "matrix" not in body.content:
            return True
        self.variables.problem(path, "a matrix inside a matrix", "list more fields in one matrix.", place)
        return False

    def _check_overrides(self, name: str, rest: Value, bodies: Mapping[str, Value]) -> None:
        """Reports an override of the stage that every variant replaces by its own value."""
        reached = {node.origin.where for body in bodies.values() for node in nodes(body)}
        for where in dict.fromkeys(node.origin.where for node in nodes(rest)):
            if where.startswith("--set ") and where not in reached:
                message = f"the override matches nothing: every variant of '{name}' states that field itself"
                fix = f"set it in stages.{name}.matrix, or of one variant, for example {next(iter(bodies))}."
                self.variables.problems.append(Problem((), message, fix, where))


def lists_of_stages(root: Value, variants: Mapping[str, list[str]]) -> Value:
    """Expands lists of stages: the name of a stage with a matrix becomes all its variants, and a pattern with
    `*` all stages that match; the selector after an @ is added to each."""
    stages = root.content.get("stages")
    if stages is None or not isinstance(stages.content, dict):
        return root

    def all_of(item: Value) -> list[Value]:
        if not isinstance(item.content, str):
            return [item]
        pattern, at, selector = item.content.partition("@")
        matching = [name for name in stages.content if fnmatchcase(name, pattern)]
        names = matching if "*" in pattern else variants.get(pattern, [])
        return [replace(item, content=f"{name}{at}{selector}") for name in names] or [item]

    def named(stage: Value) -> Value:
        if not isinstance(stage.content, dict):
            return stage
        lists = {
            field: replace(value, content=[name for item in value.content for name in all_of(item)])
            for field, value in stage.content.items()
            if field in LISTS_OF_STAGES and isinstance(value.content, list)
        }
        return replace(stage, content=stage.content | lists)

    stages = replace(stages, content={name: named(stage) for name, stage in stages.content.items()})
    return replace(root, content=root.content | {"stages": stages})


def _with(value: Value, keys: list[str], item: Value) -> Value:
    """A copy of a mapping in which the field at the path `keys` is `item`."""
    if not keys:
        return item
    fields = value.content if isinstance(value.content, dict) else {}
    return replace(
        value, content=fields | {keys[0]: _with(fields.get(keys[0], Value({}, item.origin)), keys[1:], item)}
    )


def _not_mapping(value: Value, keys: list[str]) -> str | None:
    """The first field along `keys` that cannot have fields."""
    for depth, key in enumerate(keys):
        if not isinstance(value.content, dict) or key not in value.content:
            return None
        value = value.content[key]
        if value.content is not None and not isinstance(value.content, dict):
            return ".".join(keys[: depth + 1])
    return None
