"""Values with their origins: the tree that composition works on.

Invariant: a value is never changed in place, and a value made of others keeps their origins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from specs.document import MAX_VALUES, Document, Origin
from specs.errors import FieldPath, Problem, SpecError, did_you_mean


@dataclass(frozen=True)
class Value:
    """A value with its origin. Never changed in place."""

    content: Any  # a scalar, a list of `Value`, or a mapping of text to `Value`
    origin: Origin

    def without(self, *keys: str) -> Value:
        return replace(self, content={name: item for name, item in self.content.items() if name not in keys})


def tree(document: Document) -> Value:
    def value(data: Any, path: FieldPath) -> Value:
        origin = document.origins.get(path) or Origin(document.where(path))
        if isinstance(data, dict):
            return Value({key: value(item, (*path, key)) for key, item in data.items()}, origin)
        if isinstance(data, list):
            return Value([value(item, (*path, index)) for index, item in enumerate(data)], origin)
        return Value(data, origin)

    return value(document.data, ())


def plain_document(name: str, root: Value) -> Document:
    origins: dict[FieldPath, Origin] = {}

    def plain(value: Value, path: FieldPath) -> Any:
        origins[path] = value.origin
        if isinstance(value.content, dict):
            return {key: plain(item, (*path, key)) for key, item in value.content.items()}
        if isinstance(value.content, list):
            return [plain(item, (*path, index)) for index, item in enumerate(value.content)]
        return value.content

    return Document(name, plain(root, ()), origins)


def nodes(value: Value) -> Iterator[Value]:
    yield value
    content = value.content.values() if isinstance(value.content, dict) else value.content
    for item in content if isinstance(value.content, (dict, list)) else ():
        yield from nodes(item)


def texts_of(value: Value) -> Iterator[str]:
    """Every text in a value, keys included."""
    for node in nodes(value):
        if isinstance(node.content, dict):
            yield from node.content
        elif isinstance(node.content, str):
            yield node.content


def written(value: Value) -> str:
    """A value as it is written in the file: 1e-4 stays 1e-4."""
    if isinstance(value.content, str):
        return value.content
    if isinstance(value.content, list):
        return f"[{', '.join(map(written, value.content))}]"
    if isinstance(value.content, dict):
        return f"{{{', '.join(f'{key}: {written(item)}' for key, item in value.content.items())}}}"
    return value.origin.text or json.dumps(value.content)


def literal(value: Value) -> Value:
    """The value that becomes this one when its variables are filled in."""
    content = value.content
    if isinstance(content, str):
        content = content.replace("${", "$${")
    elif isinstance(content, list):
        content = [literal(item) for item in content]
    elif isinstance(content, dict):
        content = {key.replace("${", "$${"): literal(item) for key, item in content.items()}
    return replace(value, content=content)


def merge(base: Value, over: Value, path: FieldPath, problems: list[Problem]) -> Value:
    """Merges two values: `over` wins, mappings merge key by key, and null removes a key that `base` has."""
    if not isinstance(base.content, dict) or not isinstance(over.content, dict):
        return over
    merged = dict(base.content)
    for key, item in over.content.items():
        if item.content is not None:
            merged[key] = merge(merged[key], item, (*path, key), problems) if key in merged else item
        elif key in merged:
            del merged[key]
        elif path in (("stages",), ("sources",)):
            what = str(path[0]).removesuffix("s")
            fix = did_you_mean(key, base.content)
            message = f"there is no {what} '{key}' to remove"
            problems.append(Problem((*path, key), message, fix, item.origin.where))
        else:
            merged[key] = item
    return Value(merged, over.origin)


def too_large(origin: Origin) -> SpecError:
    return SpecError.of(
        (), f"more than {MAX_VALUES} values; do matrices or variables repeat each other?", where=origin.where
    )
