"""A first recipe for the files of a folder, as `apertus init` writes it.

Files are grouped by what they hold: documents, code, rows with a text, conversations, labelled pairs. The
recipe trains a small model on all of them, in minutes on two cores.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from jinja2 import Environment, PackageLoader, StrictUndefined

from apertus_model.data.conversations.readers import COLUMNS
from apertus_model.data.documents.compressed import decompressed
from apertus_model.data.documents.table_pieces import parquet_rows
from apertus_model.data.documents.tables import json_rows
from specs.errors import SpecError
from specs.schema import with_editor_line
from specs.sources import MAX_DOCUMENT_BYTES

TEXT = (".txt", ".text", ".md", ".rst")
CODE = (
    *(".c", ".cc", ".cpp", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".kt", ".php", ".py"),
    *(".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts"),
)
ROWS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
STORE = "apertus-store"
LOOKED_AT = 20  # rows of a file, to find out what they hold
LEAST = 1_000  # bytes of documents that make a few sequences
BYTES_PER_TOKEN = 3
SMALL = {"dim": 64, "layers": 2, "vocab": 512, "length": 64, "batch": 4}
LARGER = {"dim": 128, "layers": 4, "vocab": 2048, "length": 128, "batch": 16}


@dataclass
class Group:
    """Files of a folder that one source of the recipe reads; `files` are paths below the folder."""

    name: str
    format: str
    text_column: str = "text"
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    largest: int = 0  # bytes of a file
    include: list[str] = field(default_factory=list)

    @property
    def documents(self) -> bool:
        return self.format != "chat"

    @property
    def has_long_files(self) -> bool:
        """Whether a file is one document, longer than a source has by default."""
        return self.format in ("text", "code") and self.largest > MAX_DOCUMENT_BYTES


@dataclass
class FolderContent:
    """What a folder holds: groups of files, and the files that no source reads, counted by a word on them."""

    folder: Path
    groups: list[Group]
    left_out: Counter[str]


def look(folder: Path) -> FolderContent:
    """Groups the files of a folder. SpecError when none of them holds documents."""
    groups: dict[tuple[str, str, str], Group] = {}
    left_out: Counter[str] = Counter()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if not path.is_file() or any(part.startswith(".") or part == STORE for part in parts):
            continue
        kind = _kind(path)
        if kind is None:
            left_out[f"{path.suffix or path.name}, of no known format"] += 1
            continue
        group = groups.setdefault(kind, Group(*kind))
        group.files.append("/".join(parts))
        group.bytes += (size := path.stat().st_size)
        group.largest = max(group.largest, size)
    kept: list[Group] = []
    for group in groups.values():
        if group.documents and group.bytes < LEAST:
            left_out[f"{group.name} with {group.bytes} bytes, which are too few"] += len(group.files)
            continue
        number = 1 + sum(other.name.split("-")[0] == group.name for other in kept)
        group.name += f"-{number}" if number > 1 else ""
        group.include = _globs(group, [other for other in groups.values() if other is not group])
        kept.append(group)
    if not any(group.documents for group in kept):
        fix = f"add {LEAST} bytes of {', '.join(TEXT)}, code, or JSONL or Parquet with a column of texts."
        raise SpecError.of((), f"'{folder}' has no text that a model could begin with", fix, "FOLDER")
    return FolderContent(folder, kept, left_out)


def _kind(path: Path) -> tuple[str, str, str] | None:
    """(name of the group, format, column of the text) of a file; None if no source can read it."""
    suffix = next(iter(re.findall(r"\.\w+", _suffixes(path.name.lower()))), "")
    if suffix in TEXT:
        return "texts", "text", "text"
    if suffix in CODE:
        return "code", "code", "text"
    if suffix not in ROWS:
        return None
    rows = _rows(path, ROWS[suffix])
    for columns in COLUMNS:
        if any(row.keys() >= set(columns) for row in rows):
            return ("pairs" if "chosen" in columns else "chats"), "chat", "text"
    lengths: Counter[str] = Counter()
    for row in rows:
        lengths.update({name: len(value) for name, value in row.items() if isinstance(value, str)})
    if not lengths:
        return None
    column = "text" if "text" in lengths else lengths.most_common(1)[0][0]
    return "rows", ROWS[suffix], column


def _rows(path: Path, format: str) -> list[dict[str, Any]]:
    """The first rows of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            if format == "jsonl":
                content = decompressed(file, path.name)
                rows: Iterator[Any] = (row for _, row in json_rows(content, MAX_DOCUMENT_BYTES))
            else:
                rows = parquet_rows(file, MAX_DOCUMENT_BYTES)
            return [row for row in islice(rows, LOOKED_AT) if isinstance(row, dict)]
    except (OSError, EOFError, ValueError, pyarrow.ArrowException):
        return []


def recipe(content: FolderContent) -> str:
    documents = [group for group in content.groups if group.documents]
    tokens = max(1, sum(group.bytes for group in documents) // BYTES_PER_TOKEN)
    sizes = SMALL if tokens < 100_000 else LARGER
    per_step = sizes["length"] * sizes["batch"]
    steps = min(300, max(40, 4 * tokens // per_step))
    name = re.sub(r"[^a-z0-9]+", "-", content.folder.resolve().name.lower()).strip("-") or "my-model"
    folder = Environment(loader=PackageLoader("flows.inspection", ""), undefined=StrictUndefined)
    text = folder.get_template("first_recipe.yaml.jinja").render(
        store=STORE,
        name=name,
        groups=content.groups,
        documents=documents,
        chats=[group for group in content.groups if group.name.startswith("chats")],
        pairs=[group for group in content.groups if group.name.startswith("pairs")],
        steps=steps,
        repetition=4 + 2 * steps * per_step // tokens,
        **sizes,
    )
    return with_editor_line(text)


def _globs(group: Group, others: list[Group]) -> list[str]:
    """The globs of a source. A suffix that no other group has is a glob, which finds files added later."""
    of_others = {_suffixes(file) for other in others for file in other.files}
    globs = (
        re.sub(r"([*?[])", r"[\1]", file) if _suffixes(file) in of_others else f"**/*{_suffixes(file)}"
        for file in group.files
    )
    return [*dict.fromkeys(globs)]


def _suffixes(file: str) -> str:
    """`.jsonl.gz` of `rows.jsonl.gz`."""
    path = Path(file)
    return Path(path.stem).suffix + path.suffix if path.suffix in COMPRESSIONS else path.suffix
