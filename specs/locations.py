"""Resolves the relative paths of a recipe.

Invariant: in a loaded recipe every path is absolute, so that it means the same in every folder and process. A
relative path begins in the folder of the file that states it; one of `--set` or of a default begins in the
current folder. No path enters a fingerprint.
"""

import os
import re
from pathlib import PurePath
from typing import Any, TypeVar

from specs.base import Spec, facts_of
from specs.document import Document
from specs.errors import FieldPath
from specs.units import HUGGING_FACE, Reference

RULE = "a relative path begins in the folder of the file that states it; with --set, in the current folder"
HUB_ID = re.compile(r"^(?P<name>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?$")
"""A model of the Hub, unless there is a folder of this name; `./owner/name` is always a folder."""

S = TypeVar("S", bound=Spec)


def absolute(path: str, folder: str) -> str:
    """A path that begins in `folder`; an absolute path, a URL and `installed:...` unchanged."""
    if "://" in path or path.startswith(("/", "~", "installed:")):
        return path
    joined = os.path.abspath(folder) + os.sep + path
    # a folder above that of a link is found through the link
    return os.path.realpath(joined) if ".." in PurePath(path).parts else os.path.normpath(joined)


def absolute_model(reference: str, folder: str) -> str:
    """A reference to a Hugging Face model, `hf:...`, with its folder as an absolute path."""
    path = reference.removeprefix(HUGGING_FACE)
    if HUB_ID.match(path) and not os.path.isdir(absolute(path, folder)):
        return reference
    return HUGGING_FACE + absolute(path, folder)


def located(spec: S, document: Document, path: FieldPath = ()) -> S:
    """A copy of a spec, which `document` states at `path`, with absolute paths. The document then states
    them, too."""
    changed = {}
    for name, info in type(spec).model_fields.items():
        value, is_path = getattr(spec, name), facts_of(type(spec), name).location
        resolved = _located(value, document, (*path, info.alias or name), is_path)
        if resolved != value:
            changed[name] = resolved
    return spec.model_copy(update=changed) if changed else spec


def _located(value: Any, document: Document, path: FieldPath, is_path: bool) -> Any:
    """The value of a field. `is_path`: whether its texts, and the keys of its mappings, are paths."""
    if isinstance(value, Spec):
        return located(value, document, path)
    if isinstance(value, dict):
        return {
            _absolute(key, document, (*path, key)) if is_path else key: _located(
                item, document, (*path, key), is_path
            )
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(
            _located(item, document, (*path, index), is_path) for index, item in enumerate(value)
        )
    if isinstance(value, Reference) and value.hugging_face is not None:
        resolved: str | Reference = Reference(_absolute(value.stage, document, path))
    elif isinstance(value, str) and is_path:
        resolved = _absolute(value, document, path)
    else:
        return value
    if path in document.origins:
        document.state(path, str(resolved))
    return resolved


def _absolute(text: str, document: Document, path: FieldPath) -> str:
    origin = document.origins.get(path)
    folder = origin.folder if origin is not None else ""
    return (absolute_model if text.startswith(HUGGING_FACE) else absolute)(text, folder)
