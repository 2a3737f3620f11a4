"""Every place of a recipe, found in the JSON Schema of the models, and recipes with a value at one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator

from specs.document import Document, Origin
from specs.errors import FieldPath
from specs.pipeline import Pipeline

SCHEMA = Pipeline.model_json_schema(by_alias=True, mode="validation")
LEVELS = 3  # of fields inside the fields of the recipe, of a source, a stage and a figure


class Place(NamedTuple):
    """A place of a recipe that a field, an item, a value or a member of a union may take."""

    path: FieldPath
    schema: dict[str, Any]
    tags: dict[FieldPath, str]  # the values, by path, that choose this schema
    of: str = ""  # the model, if it is a field

    def document(self, value: Any) -> Document:
        """A recipe that states a value here, of a file with a line for each of its values."""
        data: dict[str, Any] = {}
        for path, stated in [*self.tags.items(), (self.path, value)]:
            _set(data, path, stated)
        lines = enumerate(_paths(data, ()))
        return Document("r.yaml", data, {path: Origin(f"r.yaml:{line}") for line, path in lines})

    def accepts(self, value: Any) -> bool:
        return Draft202012Validator(self.schema | {"$defs": SCHEMA["$defs"]}).is_valid(value)


def places() -> list[Place]:
    """All places. Of the fields that several places share, such as those of `launch`, only the first."""
    found: dict[Any, Place] = {}
    for place in _below(Place((), SCHEMA, {}), 0):
        found.setdefault((place.of, place.path[-1]) if place.of else repr((place.path, place.tags)), place)
    return list(found.values())


def _below(place: Place, level: int) -> Iterator[Place]:
    path, schema, tags, _ = place
    name = ""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        schema = SCHEMA["$defs"][name]
    yield place._replace(schema=schema)
    if (chooses := schema.get("discriminator")) is not None:
        for value, ref in chooses["mapping"].items():
            tagged = tags | {(*path, chooses["propertyName"]): value}
            yield from _below(Place(path, {"$ref": ref}, tagged), level)
        return
    for member in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        yield from _below(Place(path, member, tags), level)
    if level > LEVELS:
        return
    for field, inner in schema.get("properties", {}).items():
        if (*path, field) not in tags:
            yield from _below(Place((*path, field), inner, tags, name or "Pipeline"), level + (path != ()))
    if isinstance(items := schema.get("items"), dict):
        yield from _below(Place((*path, 0), items, tags), level)
    for values in [schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()]:
        if isinstance(values, dict):
            yield from _below(Place((*path, "x"), values, tags), level)


def _set(data: Any, path: FieldPath, value: Any) -> None:
    """Sets a value in nested mappings and lists of one item, which are made where they are missing."""
    for part, after in pairwise(path):
        empty: Any = [] if isinstance(after, int) else {}
        if isinstance(data, list):
            data[:] = data or [empty]
            data = data[0]
        else:
            data = data.setdefault(part, empty)
    if isinstance(data, list):
        data[:] = data or [value]
    elif path and not (value == {} and path[-1] in data):
        data[path[-1]] = value


def _paths(value: Any, path: FieldPath) -> Iterator[FieldPath]:
    yield path
    for key, item in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from _paths(item, (*path, key))
