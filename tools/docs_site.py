"""Adds content to the documentation site besides the pages in docs/: the README as its first page, the files
of the repository that a page links to, and text that is made from the code."""

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
    """Adds the pages in the root folder, and the files outside of docs/ that pages link to."""
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
    """Points links to their targets on the site, and fills in the text that is made from the code."""
    for mark, make in {"optimizers": optimizers, "commands": commands}.items():
        if f"<!-- site: {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- site: {mark} -->", make())
    source = page.file.src_uri
    return LINK.sub(lambda link: _link(source, link["path"]), markdown)


def commands() -> str:
    """The commands of `apertus` with their help, in Markdown."""
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
    """The path, from the root of the repository, of the file that a page links to."""
    page = {target: name for name, target in FRONT.items()}.get(source, f"docs/{source}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def _link(source: str, path: str) -> str:
    """The link as a relative path on the site, from its page `source`."""
    target = _in_repository(source, path)
    target = FRONT.get(target, target.removeprefix("docs/"))
    return posixpath.relpath(target, posixpath.dirname(source) or ".")
