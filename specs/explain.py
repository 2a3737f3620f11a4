"""Turns Pydantic's errors into problems that name the place in the file, the value and the fix.

Invariant: a path can be followed in the document as it is written; what Pydantic adds to paths (tags of
unions, names of validators) is removed.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from specs.compose import keywords
from specs.document import Document
from specs.errors import FieldPath, Problem, did_you_mean
from specs.foreign import shown
from specs.stages import STAGES


def kind_of(value: Any) -> str | None:
    """The `kind` of a stage, as written or as read."""
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


_CHOICES = {
    "kind": list(STAGES),
    "filter": ["length", "alphabetic", "repeated-lines"],
    "method": ["fasttext", "mlp"],
}
"""The values that errors suggest, by the field that chooses between models."""


def explain(model: type[BaseModel], document: Document, details: Any) -> Problem:
    """Turns one of Pydantic's errors about a document that `model` reads into a problem with its place."""
    path = _in_document(document.data, tuple(details["loc"]))
    kind, value = details["type"], details.get("input")
    if kind == "extra_forbidden":
        candidates = [*_field_names(model, path[:-1], document.data), *keywords(path[:-1])]
        text = "the override matches nothing: " if document.overridden(path) else ""
        return Problem(
            path,
            f"{text}there is no field '{path[-1]}' here",
            did_you_mean(str(path[-1]), candidates),
            document.where(path),
        )
    if kind == "missing":
        return Problem(path, "this field is missing", "set it.", document.where(path[:-1]))
    if kind == "union_tag_invalid" or kind == "union_tag_not_found":
        stated_by = details["ctx"]["discriminator"]  # a function for stages, else the quoted name of a field
        tag = stated_by.strip("'") if stated_by.startswith("'") else "kind"
        choices = _CHOICES[tag]
        stated = value.get(tag) if isinstance(value, dict) else value
        fix = (
            did_you_mean(str(stated), choices) if stated is not None else f"set {tag}: {', '.join(choices)}."
        )
        return Problem((*path, tag), f"{shown(stated)} is not a {tag}", fix, document.where((*path, tag)))
    message = str(details["msg"]).removeprefix("Value error, ")
    begin = "" if isinstance(value, (dict, list)) or kind == "value_error" else f"{shown(value)}: "
    return Problem(path, f"{begin}{message[0].lower() + message[1:]}", "", document.where(path))


def _in_document(data: Any, location: tuple[Any, ...]) -> FieldPath:
    """Pydantic's location as a path in the document, without tags of unions and names of validators."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        if (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]
            path.append(part)
        elif (
            index == len(location) - 1
            and isinstance(data, dict)
            and part not in STAGES
            and "[" not in str(part)
        ):
            path.append(part)
    return tuple(path)


def _field_names(model: type[BaseModel], path: FieldPath, data: Any) -> list[str]:
    """Names of the fields that `path` may have, found by following the models' annotations."""
    current: list[type[BaseModel]] = [model]
    for part in path:
        annotations = [
            field.annotation
            for candidate in current
            for name, field in candidate.model_fields.items()
            if part in (name, field.alias) and field.annotation is not None
        ]
        data = (
            data.get(part)
            if isinstance(data, dict)
            else (data[part] if isinstance(data, list) and isinstance(part, int) else None)
        )
        found = [candidate for annotation in annotations for candidate in _models(annotation)]
        if annotations:
            current = found
        kind = kind_of(data)
        if isinstance(kind, str) and kind in STAGES and len(path) >= 2 and path[0] == "stages":
            current = [STAGES[kind]] if part == path[1] else current
    return [field.alias or name for candidate in current for name, field in candidate.model_fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, UnionType, list, dict, tuple):
        return [model for argument in get_args(annotation) for model in _models(argument)]
    return []
