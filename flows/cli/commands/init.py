"""`apertus init`: writes a first recipe for the files of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows.cli.app import app, console
from flows.format import amount
from specs.errors import SpecError


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="the folder with texts, code, JSONL, Parquet, chats")],
    name: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="below the folder")
    ] = "recipe.yaml",
) -> None:
    """Write a recipe for the files in a folder: a small model of them, which trains in minutes."""
    from flows.inspection.first_recipe import look, recipe  # loads pyarrow

    if not folder.is_dir():
        raise SpecError.of((), f"'{folder}' is no folder", "name the folder that has the files.", "FOLDER")
    target = folder / name
    if target.exists():
        fix = "remove it, or name another with --output."
        raise SpecError.of((), f"'{target}' exists, and nothing is overwritten", fix, "--output")
    content = look(folder)
    target.write_text(recipe(content), encoding="utf-8")
    for group in content.groups:
        files = f"{len(group.files)} file{'s' if len(group.files) > 1 else ''}, {amount(group.bytes)}B"
        console.print(f"{escape(group.name)}: {files}, format {group.format}", soft_wrap=True)
    for what, count in sorted(content.left_out.items()):
        console.print(f"left out: {count} of {escape(what)}", soft_wrap=True)
    path = escape(str(target))
    console.print(f"The recipe is {path}. Next: apertus plan {path}, apertus run {path}", soft_wrap=True)
