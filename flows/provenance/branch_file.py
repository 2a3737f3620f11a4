"""Writes the file of a branch: its changes to the recipe that it extends, as YAML that people read.

Invariant: a value is where composing looks for it: a field of a matrix's variant is stated for the matrix if
all its variants share it, and refused otherwise. A mapping that replaces one of the recipe removes its keys.
"""

import copy
import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from specs.document import keys_of, parse, stage_of
from specs.errors import FieldPath, SpecError, did_you_mean
from specs.foreign import shown
from specs.pipeline import Pipeline
from specs.redaction import mask_url

WIDTH = 100  # of a line, without its indentation


class Draft:
    """The content of the new file: `data` is what it states, `comments` follow fields. `base` is the file
    that it extends, `unfilled` the content of `base` before variables are filled in."""

    def __init__(self, pipeline: Pipeline, name: str, base: str, unfilled: dict[str, Any]) -> None:
        assert pipeline._document is not None, "a recipe that was loaded has a document"
        self.document = pipeline._document
        self.unfilled = unfilled
        self.name = name
        self.data: dict[str, Any] = {"extends": base, "name": name, "stages": {name: {}}}
        self.comments: dict[FieldPath, str] = {}
        self.notes: list[str] = []

    def add(self, path: FieldPath, value: Any, comment: str) -> None:
        """States a field; `path` is its path in the composed recipe."""
        place = self._written(path, value)
        self._set(list(place), value)
        if comment:
            self.comments[place] = comment

    def override(self, assignment: str) -> None:
        """States one `path=value` of `--set`. SpecError if malformed; fields are checked with the recipe."""
        where = f"--set {mask_url(assignment)}"
        target, equals, text = assignment.partition("=")
        target = target.strip()
        own = f"{target}.".startswith(f"stages.{self.name}.")
        keys = keys_of(target, self.name if own else stage_of(self.document, target))
        if not equals or not all(keys):
            message = f"'{mask_url(assignment)}' is not an assignment"
            raise SpecError.of((), message, "write path=value.", where)
        if keys[0] in ("extends", "name"):
            raise SpecError.of((), f"a branch states its own {keys[0]}", "leave it out.", where)
        there = [*self.document.data["stages"], *self.data["stages"]]
        if keys[0] == "stages" and len(keys) > 2 and keys[1] not in there:
            fix = did_you_mean(keys[1], [self.name, *there])
            raise SpecError.of((), f"the override matches nothing: there is no stage '{keys[1]}'", fix, where)
        try:
            value = parse(f"value: {text}" if "\n" not in text else f"value:\n{text}", where).data["value"]
        except SpecError:
            message = f"the value '{mask_url(text)}' is not YAML"
            raise SpecError.of((), message, "quote it.", where) from None
        path = self._written(tuple(keys), value)
        for place in [place for place in self.comments if place[: len(path)] == path]:
            del self.comments[place]
        self._set(list(path), value)

    def _written(self, path: FieldPath, value: Any) -> FieldPath:
        """The path at which a field is stated: for a variant of a matrix, in the stage of the matrix."""
        matrix = self.matrix_of(path)
        if matrix is None:
            return path
        if self.differs(path):
            field = ".".join(map(str, path[2:]))
            message = f"'{path[1]}' is a variant of the matrix '{matrix}', whose variants differ in {field}"
            own = f"give '{path[1]}' a stage of its own in the recipe."
            fix = f"a branch cannot state {shown(value)} for one of them: {own}"
            raise SpecError.of(path, message, fix, self.document.where(path))
        return ("stages", matrix, *path[2:])

    def matrix_of(self, path: FieldPath) -> str | None:
        """The matrix of which the stage at the path of a field is a variant."""
        stage = path[1] if path[0] == "stages" and len(path) > 2 else ""
        return next((name for name, members in self.document.variants.items() if stage in members), None)

    def differs(self, path: FieldPath) -> bool:
        """Whether a field is of a matrix's variant, and the variants differ in it."""
        variants = self.document.variants.get(self.matrix_of(path) or "", [])
        values = [_at(self.document.data, ("stages", variant, *path[2:])) for variant in variants]
        return any(value != values[0] for value in values)

    def _set(self, keys: list[str | int], value: Any) -> None:
        """Sets a field of the new file. A list is stated as a whole, and so is a mapping that is a
        variable; keys of the old mapping that a new one leaves out are removed."""
        place: Any = self.data
        whole = False  # the value stated here replaces all that the base has
        for depth, key in enumerate(keys[:-1]):
            path = tuple(keys[: depth + 1])
            base = self._filled(path)
            whole = whole or isinstance(base, list) or self._is_variable(path)
            if isinstance(place, list):
                place = place[_index(key, place)]
                continue
            if place.get(key) is None:
                place[key] = copy.deepcopy(base) if whole and base is not None else {}
            elif not isinstance(place[key], (dict, list)):
                place[key] = {}
            place = place[key]
        if isinstance(place, list):
            place[_index(keys[-1], place)] = value
        elif whole and value is None:
            place.pop(keys[-1], None)
        else:
            old = _at(self.document.data, tuple(keys))
            replaces = whole or self._is_variable(tuple(keys))
            if isinstance(value, dict) and isinstance(old, dict) and not replaces:
                value = {**{key: None for key in old if key not in value}, **value}
            place[keys[-1]] = value

    def _filled(self, path: FieldPath) -> Any:
        """The value of the base at a path of the new file; for a matrix, the value of its first variant."""
        if path[0] == "stages" and len(path) > 2 and path[1] in self.document.variants:
            path = ("stages", self.document.variants[str(path[1])][0], *path[2:])
        return _at(self.document.data, path)

    def _is_variable(self, path: FieldPath) -> bool:
        """Whether the base states `${name}` at a path, or at a place above it."""
        return any(isinstance(_at(self.unfilled, path[:end]), str) for end in range(1, len(path) + 1))


def _index(key: str | int, items: list[Any]) -> int:
    if str(key).isdecimal() and int(key) < len(items):
        return int(key)
    message = f"the override matches nothing: there is no item '{key}'; there are {len(items)}"
    raise SpecError.of((), message, where="--set")


def _at(data: Any, path: FieldPath) -> Any:
    for key in path:
        if isinstance(data, dict):
            data = data.get(str(key)) if key not in data else data[key]
        elif isinstance(data, list) and str(key).isdecimal() and int(key) < len(data):
            data = data[int(key)]
        else:
            return None
    return data


# As text


def written(draft: Draft, head: list[str]) -> str:
    """The text of the file. `head`: the lines of the comment at its top."""
    lines = [f"# {line}" for line in head]
    lines += [f"# Note: {note}." for note in draft.notes]
    lines += _field("extends", draft.data["extends"]) + _field("name", draft.name)
    for section, content in draft.data.items():
        if section == "stages":
            lines += ["", "stages:"]
            for name, fields in content.items():
                lines += _stage(draft, name, fields)
        elif section not in ("extends", "name"):
            lines += ["", *_field(section, content)]
    return "\n".join(lines) + "\n"


def _stage(draft: Draft, name: str, fields: Any) -> list[str]:
    """A stage as a block. A comment follows the first line of its field."""
    if not isinstance(fields, dict) or not fields:
        return [f"  {line}" for line in _field(name, fields)]
    about = {path[1:3]: f" # {comment}" for path, comment in draft.comments.items()}
    lines = [f"  {_field(name, None)[0].removesuffix(' null')}{about.get((name,), '')}"]
    for key, value in fields.items():
        first, *others = _field(key, value)
        lines += [f"    {first}{about.get((name, key), '')}", *(f"    {line}" for line in others)]
    return lines


def _field(name: str, value: Any) -> list[str]:
    """A field as YAML. Variables are filled in by now, so a `${` in text is escaped."""
    yaml, text = YAML(typ="rt"), io.StringIO()
    yaml.width, yaml.default_flow_style = WIDTH, None  # mappings and lists of plain values are in brackets
    yaml.representer.ignore_aliases = lambda data: True
    field = CommentedMap({name: _escaped(value)})
    field.fa.set_block_style()
    yaml.dump(field, text)
    return text.getvalue().splitlines()


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value
