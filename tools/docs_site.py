"""What the documentation site has beside the pages in docs/: its first page, which is the README, the
files of the repository that a page links to, and what is made from the code."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.reference import optimizers, plain

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<path>[^)#\s]+)")
FRONT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root, and files that pages link to outside of docs/."""
    for name, page in FRONT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for file in [*files.documentation_pages()]:
        for path in LINK.findall(file.content_string):
            target = _in_repository(file.src_uri, path)
            inside = target.startswith("docs/") or target in FRONT
            if not inside and (ROOT / target).is_file() and target not in files.src_uris:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Points links to where the site has their targets, and fills in what is made from the code."""
    for mark, make in {"optimizers": optimizers, "commands": commands}.items():
        if f"<!-- site: {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- site: {mark} -->", make())
    source = page.file.src_uri
    return LINK.sub(lambda link: _link(source, link["path"]), markdown)


def commands() -> str:
    """Every command of `apertus` with its help."""
    from flows.cli.__main__ import app

    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="apertus")
    sections = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]  # it is a group
        inner = typer.Context(command, info_name=name, parent=context)
        rows = [option.get_help_record(inner) for option in command.params]
        table = [f"| `{row[0].strip()}` | {plain(row[1])} |" for row in rows if row]
        head = ["| argument | meaning |", "|---|---|"] if table else []
        sections.append("\n".join([f"## {name}", "", plain(command.help or ""), "", *head, *table, ""]))
    return "\n".join(sections)


def _in_repository(source: str, path: str) -> str:
    """Where a link of a page leads to, from the root of the repository."""
    page = {made: name for name, made in FRONT.items()}.get(source, f"docs/{source}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def _link(source: str, path: str) -> str:
    """The link as the site has it, from the page `source` of the site."""
    target = _in_repository(source, path)
    target = FRONT.get(target, target.removeprefix("docs/"))
    return posixpath.relpath(target, posixpath.dirname(source) or ".")
