"""The files that commands write for people.

Invariants: the ending of a name is that of what is written. A file is replaced only by one of its own kind,
and never if it is a source of the command's recipe or in its store. It is written whole or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specs.errors import StageError

if TYPE_CHECKING:
    from flows.planning.plan import Plan

OUTPUT = ("--output", "-o")
BEGINNINGS = {  # of what is written, in small letters, by ending
    ".csv": b"run,stage,part,attempt,",
    ".html": b"<!doctype html>",
    ".json": b'{\n "$defs": {',  # a JSON Schema
    ".jsonl": b'{"run": ',
    ".parquet": b"par1",
    ".svg": b"<svg ",
}


def file_option(help: str, *endings: str, names: tuple[str, ...] = ()) -> Any:
    """An option that names a file with one of these endings. StageError, before the command begins, for
    another ending, and for a place where the file cannot be written."""

    def check(path: Path | None) -> Path | None:
        if path is not None:
            _check(path, endings)
        return path

    return typer.Option(*names, metavar=f"FILE{endings[0]}", callback=check, help=help)


def write(path: Path, content: str | bytes, plan: Plan | None = None) -> None:
    """Writes a file, or replaces one of the same kind. StageError where that is not allowed."""
    from infra.store.storage.local import replace

    _check(path, (path.suffix.lower(),))
    target = path.resolve()
    if plan is not None:
        _spare(target, path, plan)
    replace(target, content.encode() if isinstance(content, str) else content, durable=False)


def _check(path: Path, endings: tuple[str, ...]) -> None:
    ending = path.suffix.lower()
    if ending not in endings:
        what = f"'{path}' is no name of a file that ends in {' or '.join(endings)}"
        raise StageError(f"{what}. Fix: name it {path.name.split('.')[0] or 'file'}{endings[0]}")
    try:
        folder = path.resolve().parent
    except (ValueError, RuntimeError, OSError) as error:  # a NUL, a loop of links
        raise StageError(f"'{path}' is no name of a file: {error}") from error
    if not os.access(folder, os.W_OK):
        raise StageError(f"'{path}': there is no folder '{folder}' in which it can be written. Fix: make it")
    begin = BEGINNINGS.get(ending)
    if begin is None or not path.exists():
        return
    there = b"no file"
    if path.is_file():
        with path.open("rb") as file:
            there = file.read(len(begin)).lower()
    if there and there != begin:
        raise StageError(f"'{path}' exists, and is not what this command writes. Fix: name another file")


def _spare(target: Path, path: Path, plan: Plan) -> None:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    fix = "Fix: name another file"
    if plan.store.is_local and target.is_relative_to(plan.store.root):
        raise StageError(f"'{path}' is in the store {plan.store.url}, which runs alone write to. {fix}")
    for name, listing in plan.graph.listings.items():
        fs, root = fsspec.core.url_to_fs(listing.url)
        relative = os.path.relpath(target, os.path.realpath(root))
        if isinstance(fs, LocalFileSystem) and any((file.path or ".") == relative for file in listing.files):
            raise StageError(f"'{path}' is a file of the source '{name}'. {fix}")
