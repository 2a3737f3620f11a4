"""Documents the fields of a recipe on the documentation site: mkdocstrings shows a Pydantic model as its
docstring, and this extension of griffe appends the table of its fields.

Invariant: the site says about a field what the model says: type, default, role and description.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import griffe
from pydantic import BaseModel, Discriminator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from specs.base import Spec, facts_of
from specs.capabilities import OPTIMIZERS
from specs.pipeline import Pipeline
from specs.stages.base import Stage

NAMES: dict[Any, str] = {type(None): "null", str: "text", dict: "map", list: "list", tuple: "list"}


class Fields(griffe.Extension):
    """An extension that adds the table of fields to the docstring of every spec."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if not cls.path.startswith("specs."):
            return
        model = getattr(importlib.import_module(cls.module.path), cls.name, None)
        if isinstance(model, type) and issubclass(model, Spec):
            text = cls.docstring.value if cls.docstring else ""
            cls.docstring = griffe.Docstring(f"{text}\n\n{table(model)}", parent=cls)


def table(model: type[BaseModel]) -> str:
    """The fields of a model in Markdown; for a stage, without the fields that every stage has."""
    common = set(Stage.model_fields) if issubclass(model, Stage) and model is not Stage else set()
    lines = ["| field | type | default | role | description |", "|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name not in common:
            cells = [
                _type(field.annotation),
                _default(field),
                facts_of(model, name).role,
                plain(field.description or ""),
            ]
            lines.append(f"| `{field.alias or name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def optimizers() -> str:
    """The fields that each optimizer reads, and the source of its defaults, in Markdown."""
    lines = ["| `name` | reads, beside `lr` | source of the defaults |", "|---|---|---|"]
    for name, published in OPTIMIZERS.items():
        fields = ", ".join(f"`{field}` {json.dumps(value)}" for field, value in published.defaults.items())
        lines.append(f"| `{name}` | {fields} | {published.source} |")
    return "\n".join(lines) + "\n"


def models(model: type[BaseModel] = Pipeline) -> set[type[BaseModel]]:
    """The model and all models that its fields hold."""
    seen, waiting = set(), [model]
    while waiting:
        model = waiting.pop()
        if model not in seen:
            seen.add(model)
            waiting += [
                inner for field in model.model_fields.values() for inner in _models_in(field.annotation)
            ]
    return seen


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not Literal:
        for argument in get_args(annotation):
            yield from _models_in(argument)


def _type(annotation: Any) -> str:
    return _spelled(annotation).replace("|", "\\|")


def _spelled(annotation: Any) -> str:
    """An annotation for readers: unions with `|`, no metadata, and models as links."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if any(isinstance(mark, Discriminator) for mark in arguments[1:]):
            return "a stage"
        return _spelled(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_spelled(argument) for argument in arguments)
    if origin is Literal:
        return " | ".join(f"`{argument}`" for argument in arguments)
    if origin is not None:
        joint = {dict: " to ", tuple: ", "}.get(origin, "")
        return f"{NAMES[origin]} of {joint.join(_spelled(argument) for argument in arguments)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}][{annotation.__module__}.{annotation.__name__}]"
    return NAMES.get(annotation) or str(annotation.__name__)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    return f"`{json.dumps(value, default=str)}`".replace("|", "\\|")


def plain(description: str) -> str:
    """A description for a table cell: outside of code, characters special to Markdown or HTML are escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(description.split()))
    escaped = [
        re.sub(r"([<*_\[\]])", r"\\\1", part) if index % 2 == 0 else part for index, part in enumerate(parts)
    ]
    return "".join(escaped).replace("|", "\\|")
