"""Sources: the files of documents outside the store, and how they are read.

Invariant: the location of the files (`url`, globs) and their licence are not identity fields. Their content
is part of the identity, through digests that the store records.
"""

import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, field_validator, model_validator

from specs.base import Spec, execution, identity, location, option
from specs.units import Budget

CONVERSATIONAL = ("chat", "conversations")
INSTALLED = ("documents", "conversations")
"""Formats whose files a function of an installed package reads."""
TOKENISED = ("megatron",)
TABLES = ("jsonl", "parquet", "arrow")
ROWS = (*TABLES, "warc")
COMPRESSED_INSIDE = ("parquet", "arrow")
"""Formats with a compression of their own."""
Format = Literal[
    "text", "code", "jsonl", "parquet", "arrow", "warc", "megatron", "documents", "chat", "conversations"
]
MAX_DOCUMENT_BYTES = 2**24
FUNCTION = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""A function of an installed package, `package.module:name`. It is imported when a stage calls it, never
by a plan."""
DEFAULT_INCLUDE = {
    "parquet": ["**/*.parquet"],
    "arrow": ["**/*.arrow"],
    "warc": ["**/*.warc", "**/*.warc.*"],
    "megatron": ["**/*.bin", "**/*.idx"],
}
"""Globs of formats that share folders with other files: a folder of `save_to_disk` has JSON files too."""
ONLY_FOR = {
    "text_column": TABLES,
    "id_column": TABLES,
    "metadata": TABLES,
    "reader": INSTALLED,
    "version": INSTALLED,
    "html": ("warc",),
    "tokenizer": TOKENISED,
    "markers": TOKENISED,
}


def usual_globs(data: Any) -> Any:
    """The fields of a source as stated, with the globs of its format unless it states its own."""
    usual = DEFAULT_INCLUDE.get(str(data.get("format"))) if isinstance(data, dict) else None
    return {"include": usual, **data} if usual else data


class Declared(Spec):
    """The size of a source that may be unavailable when a recipe is planned. The plan then uses this size and
    says so; running needs the files. The size is compared with the files, and with the corpus, as soon as
    they exist."""

    tokens: Budget | None = execution(
        None,
        description="tokens of the corpus made from the source, after its filters: `4815B tokens`",
    )
    documents: int | None = execution(None, ge=1, description="number of documents or conversations")

    def conflicts(self) -> Iterator[str]:
        if self.tokens is None and self.documents is None:
            yield "nothing is declared; set tokens or documents"
        if self.tokens is not None and (self.tokens.unit != "tokens" or not self.tokens.amount):
            yield f"'{self.tokens}' is not the size of a source; write for example 4815B tokens"


class SourceSpec(Spec):
    """Files of documents or conversations.

    Formats of documents: `text`, `code`: a file is a document. `jsonl`, `parquet`, `arrow` (files, streams,
    and the shards of a Hugging Face dataset that `save_to_disk` wrote): a row is a document (`text_column`).
    `warc`: a page of a web archive is a document. `megatron`: pairs of `.bin` and `.idx`, already tokenised
    and used as they are, so without filters. `documents`: `reader` finds the documents in a file.

    Formats of conversations: `chat`: a row of JSONL or Parquet with `messages`, with `prompt` and
    `completion`, or with `chosen` and `rejected` (docs/reference/conversations.md has all columns).
    `conversations`: `reader` finds the conversations in a file.

    Text, code, JSONL and WARC files may be compressed (.gz, .bz2, .xz, .zst), whatever their name.

    A dataset of the Hugging Face hub is its files: `hf://datasets/<name>@<revision>/<folder>`, as `parquet`.
    No script of a dataset is run.
    """

    url: str = location(
        min_length=1,
        description="folder or file on any fsspec URL, or `installed:stdlib`, `installed:site-packages`,"
        " `installed:<package>`",
    )
    format: Format = identity()
    include: list[str] = execution(
        default_factory=lambda: ["**/*"],
        description="globs below the url; the suffixes of parquet, arrow, warc and megatron by default",
    )
    exclude: list[str] = execution(default_factory=list)
    text_column: str = option("text", description="for jsonl, parquet, arrow: column with the text")
    id_column: str | None = option(
        None, description="for jsonl, parquet, arrow: column with the name of the document"
    )
    metadata: list[str] = option(
        default_factory=list,
        description="for jsonl, parquet, arrow: columns of single values that filters read (url, language, a"
        " score); warc always has url and date",
    )
    html: Literal["trafilatura", "raw"] = option(
        "trafilatura", description="for warc: how the text of a page is extracted"
    )
    tokenizer: str | None = execution(
        None,
        description="for megatron, required: the tokenizer of the tokens, as sha256:<digest of its"
        " tokenizer.json, 12 digits or more>, compared with the corpus's; or `trusted`, which states that"
        " they are the same",
    )
    markers: Literal["both", "end", "none"] = option(
        "both",
        description="for megatron: the begin- and end-of-document tokens that every document has; they are"
        " checked, and a missing one is added",
    )
    reader: str | None = option(
        None,
        pattern=rf"^{FUNCTION}$",
        description="for documents and conversations, required: `package.module:name`, a function of an"
        " installed package that takes (file, source, path)",
    )
    version: int | None = option(
        None, ge=1, description="version of the reader, required: raise it when its results change"
    )
    max_document_bytes: int = option(
        MAX_DOCUMENT_BYTES,
        ge=1,
        description="a longer document (its text, or line of JSON, row with its columns, record of an"
        " archive; decompressed) is rejected as `too_large` before it is held in memory",
    )
    limit: int | None = option(None, ge=1, description="maximum number of documents")
    language: str = execution("", description="recorded for the audit")
    license: str = execution("", description="recorded for the audit")
    declared: Declared | None = execution(
        None,
        description="size of the source, so that the recipe can be planned without the files; `run` still"
        " needs them",
    )

    _usual_globs = model_validator(mode="before")(usual_globs)

    def conflicts(self) -> Iterator[str]:
        for name, formats in ONLY_FOR.items():
            if self.format in formats or name not in self.model_fields_set:
                continue
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                yield f"{name} belongs to {' and '.join(formats)}; this is {self.format}"
        named = [self.text_column, *self.metadata]
        if len(set(named)) < len(named):
            yield f"metadata {self.metadata} names a column twice, or the text column {self.text_column!r}"
        if self.format in INSTALLED and (self.reader is None or self.version is None):
            yield f"format {self.format} needs a function: set reader: package.module:name and version: 1"
        if self.format in TOKENISED and not re.fullmatch(
            r"trusted|sha256:[0-9a-f]{12,64}", self.tokenizer or ""
        ):
            yield (
                "tokens do not say what made them: set tokenizer: sha256:<digest of its tokenizer.json>, or"
                " trusted"
            )

    @field_validator("url")
    @classmethod
    def _known_package(cls, url: str) -> str:
        resolve_url(url)
        repository = re.match(r"hf://(?!buckets/)(?:datasets/|spaces/|models/)?+[^/]+/([^/]+)", url)
        if repository and "@" not in repository[1]:
            raise ValueError(
                "a repository of the hub without a revision, which may change at any time: write"
                " <owner>/<name>@<revision>"
            )
        return url


def _readable(url: str) -> str:
    resolve_url(url)
    return url


Url = Annotated[str, AfterValidator(_readable)]
"""A place on any fsspec URL, or `installed:...` of an installed package."""


def resolve_url(url: str) -> str:
    """`installed:stdlib`, `installed:site-packages` or `installed:<package>[/folder]` as a local path; any
    other URL unchanged.

    Imports nothing. Raises ValueError if there is no such package."""
    if not url.startswith("installed:"):
        return url
    name, _, rest = url.removeprefix("installed:").partition("/")
    if name in ("stdlib", "site-packages"):
        root = _library("stdlib" if name == "stdlib" else "purelib")
    else:
        package = importlib.util.find_spec(name) if name.isidentifier() else None
        if package is None or not package.submodule_search_locations:
            raise ValueError(f"there is no installed package {name!r}; install it or name another source")
        root = Path(next(iter(package.submodule_search_locations)))
    if ".." in Path(rest).parts:
        raise ValueError(f"'{url}' leaves the package")
    return str(root / rest) if rest else str(root)


@cache
def _library(name: str) -> Path:
    return Path(sysconfig.get_path(name))
