"""Turns Pydantic's errors into problems that name the place in the file, the value and the fix.

Invariant: a path can be followed in the document as it is written. What Pydantic adds to paths (tags and
members of unions) and what a field may hold (fields, tags) are read from the schema that Pydantic validates
with, never guessed from names.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from specs.document import Document
from specs.errors import FieldPath, Problem, did_you_mean
from specs.foreign import shown
from specs.wording import message_of, wording, wrong_type


@dataclass(frozen=True)
class _Place:
    """The place of one of Pydantic's errors."""

    path: FieldPath  # in the document
    parent: list[Any]  # the schemas of what holds it
    schemas: list[Any]  # of all that may be written there
    member: tuple[FieldPath, int | str] | None  # the outermost union, by its path, and its member in error


def explain(
    model: type[BaseModel],
    document: Document,
    error: ValidationError,
    keywords: Callable[[FieldPath], tuple[str, ...]] = lambda path: (),
) -> list[Problem]:
    """The problems of a document that `model` reads. `keywords`: the names that are accepted at a path
    besides the model's fields.

    Of a value that no member of a union accepts, only the errors of the nearest member are reported."""
    unions: dict[Any, dict[Any, list[tuple[_Place, Any]]]] = {}
    for number, details in enumerate(error.errors()):
        place = _followed(model, document.data, details["loc"])
        union, member = place.member or (number, "")
        unions.setdefault(union, {}).setdefault(member, []).append((place, details))
    kept = [member for members in unions.values() for member in _nearest(members)]
    return [_problem(document, place, details, keywords) for place, details in kept]


def _nearest(members: dict[Any, list[tuple[_Place, Any]]]) -> list[tuple[_Place, Any]]:
    """The errors of the member of a union that the value comes nearest to: one that has its type, and the
    fewest errors."""
    typed = [
        errors
        for errors in members.values()
        if any(
            wrong_type(details) is None or place.member and len(place.path) > len(place.member[0])
            for place, details in errors
        )
    ]
    return min(typed or members.values(), key=len)


def _problem(
    document: Document, place: _Place, details: Any, keywords: Callable[[FieldPath], tuple[str, ...]]
) -> Problem:
    path, value = place.path, details["input"]
    where = document.where(path)
    if details["type"] == "extra_forbidden":
        text = "the override matches nothing: " if document.overridden(path) else ""
        fields = [name for schema in place.parent for name in _fields(schema)]
        fix = did_you_mean(str(path[-1]), [*fields, *keywords(path[:-1])])
        return Problem(path, f"{text}there is no field '{path[-1]}' here", fix, where)
    if details["type"] == "missing":
        if isinstance(details["loc"][-1], int):
            return Problem(path, f"{shown(value)} is too short", "add what is missing.", where)
        return Problem(path, "this field is missing", "set it.", document.where(path[:-1]))
    if details["type"].startswith("union_tag_"):
        union = next(schema for schema in place.schemas if schema["type"] == "tagged-union")
        tag, choices = union["discriminator"], list(union["choices"])
        at = (*path, tag)
        if details["type"] == "union_tag_not_found":
            return Problem(at, "this field is missing", f"set it to one of {', '.join(choices)}.", where)
        message = f"there is no {tag} {shown(value[tag])}"
        return Problem(at, message, did_you_mean(str(value[tag]), choices), document.where(at))
    if (words := wording(details, place.schemas)) is not None:
        return Problem(path, f"{shown(value)} is {words.phrase}", words.fix, where)
    return Problem(path, message_of(details), "", where)


def _followed(model: type[BaseModel], data: Any, location: Iterable[int | str]) -> _Place:
    """The place of an error: its location, without members and tags of unions, and without the levels that
    the models' validators add to what is written."""
    root: Any = model.__pydantic_core_schema__
    definitions = {schema["ref"]: schema for schema in root.get("definitions", ())}

    def opened(schemas: Iterable[Any]) -> list[Any]:
        """The schemas without wrappers, such as defaults and validators, and those of what else a validator
        accepts."""
        inner: list[Any] = []
        for schema in schemas:
            while "schema" in schema or schema["type"] == "definition-ref":
                if "json_schema_input_schema" in schema:
                    inner += opened(_members(schema["json_schema_input_schema"]))
                schema = schema["schema"] if "schema" in schema else definitions[schema["schema_ref"]]
            inner.append(schema)
        return inner

    path: list[int | str] = []
    member: tuple[FieldPath, int | str] | None = None
    added = False  # whether a validator added the current level
    parent, schemas = list[Any](), opened([root])
    written = schemas
    for part in location:
        if chosen := [choice for schema in schemas for choice in _chosen(schema, part)]:
            schemas = opened(chosen)
        elif members := [
            choice for schema in schemas if schema["type"] == "union" for choice in _members(schema)
        ]:
            schemas, member = opened(members), member or (tuple(path), part)
        elif part != "[key]":  # which stands after the key that is wrong
            parent, schemas = schemas, opened(_below(schemas, part))
            if isinstance(data, dict):
                data = data.get(str(part))
            elif isinstance(data, list) and isinstance(part, int) and part < len(data):
                data = data[part]
            else:
                added = True
            path += [] if added else [part]
        written = written if added else schemas
    return _Place(tuple(path), parent, written, member)


def _chosen(schema: Any, tag: int | str) -> list[Any]:
    """The schema that a tag of a union chooses; all of them where a function makes the tags."""
    if schema["type"] != "tagged-union" or tag not in schema["choices"]:
        return []
    choices = schema["choices"]
    return list(choices.values()) if callable(schema["discriminator"]) else [choices[tag]]


def _members(schema: Any) -> list[Any]:
    """The schemas of the members of a union without tags, some of which have labels; of another schema,
    itself."""
    if schema["type"] != "union":
        return [schema]
    return [choice[0] if isinstance(choice, tuple) else choice for choice in schema["choices"]]


def _fields(schema: Any) -> dict[str, Any]:
    """The schemas of a model's fields by their names in a file."""
    fields = schema["fields"] if schema["type"] == "model-fields" else {}
    return {field.get("validation_alias", name): field for name, field in fields.items()}


def _below(schemas: Iterable[Any], part: int | str) -> list[Any]:
    """The schemas of what an entry of a model, a mapping or a list may hold."""
    children = []
    for schema in schemas:
        if schema["type"] in ("dict", "list"):
            children.append(schema["values_schema" if schema["type"] == "dict" else "items_schema"])
        inside: Any = enumerate(schema["items_schema"]) if schema["type"] == "tuple" else ()
        children += [inner for key, inner in [*_fields(schema).items(), *inside] if key == part]
    return children
