"""Documents from outside: where they lie and how they are read.

Invariant: where the files lie (`url`, globs, licence) bears no identity; what they hold does, through digests that the store records.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from specs.base import Spec, execution, identity

CONVERSATIONAL = ("chat", "function-questions")
Format = Literal["text", "code", "docstrings", "literals", "jsonl", "gettext-json", "chat", "function-questions"]


class SourceSpec(Spec):
    """Files under `url` (a folder or file on any fsspec URL, or `installed:stdlib`, `installed:site-packages`,
    `installed:<package>`), read as `format`.

    `text`, `code`: a file is a document. `docstrings`: each docstring of a Python file. `literals`: each long string in a Python file.
    `jsonl`: a line is a document (`text_column`). `gettext-json`: the translated messages of Jed catalogues, joined.
    For conversations: `chat`: a row of JSONL or Parquet with `messages`, with `prompt` and `completion`, or with `prompt`, `chosen` and
    `rejected`. `function-questions`: questions about the public functions of Python files, and their documented answers.
    """

    url: str = execution(min_length=1)
    format: Format = identity()
    include: list[str] = execution(default_factory=lambda: ["**/*"], description="globs below the url")
    exclude: list[str] = execution(default_factory=list)
    text_column: str = identity("text", neutral="text", description="of jsonl")
    min_literal: int = identity(200, neutral=200, ge=1, description="of literals: characters from which a string is a document")
    limit: int | None = identity(None, neutral=None, ge=1, description="documents at most")
    language: str = execution("", description="recorded for the audit")
    license: str = execution("", description="recorded for the audit")

    @field_validator("url")
    @classmethod
    def _known_package(cls, url: str) -> str:
        resolve_url(url)
        return without_credentials(url)


def resolve_url(url: str) -> str:
    """`installed:stdlib`, `installed:site-packages` or `installed:<package>[/folder]` as a local path; any other URL unchanged.

    Imports nothing. ValueError when there is no such package."""
    if not url.startswith("installed:"):
        return url
    name, _, rest = url.removeprefix("installed:").partition("/")
    if name in ("stdlib", "site-packages"):
        root = Path(sysconfig.get_paths()["stdlib" if name == "stdlib" else "purelib"])
    else:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise ValueError(f"there is no installed package {name!r}; install it or name another source")
        root = Path(next(iter(found.submodule_search_locations)))
    if ".." in Path(rest).parts:
        raise ValueError(f"'{url}' leaves the package")
    return str(root / rest) if rest else str(root)


def without_credentials(url: str) -> str:
    """The url. ValueError, which does not repeat it, when it carries a user name or password."""
    if re.search(r"://[^/]*@", url):
        raise ValueError("a URL with credentials in it; leave them out, the storage client reads them from the environment")
    return url


class LengthFilter(Spec):
    """Drops documents shorter or longer than stated, in characters."""

    filter: Literal["length"] = identity()
    min_characters: int = identity(0, ge=0)
    max_characters: int | None = identity(None, ge=1)


class AlphabeticFilter(Spec):
    """Drops documents in which letters (of any script) and spaces are a smaller share of the characters than `min_share`."""

    filter: Literal["alphabetic"] = identity()
    min_share: float = identity(0.6, ge=0, le=1)


class RepeatedLinesFilter(Spec):
    """Drops documents in which repeated lines hold a larger share of the characters than `max_share`."""

    filter: Literal["repeated-lines"] = identity()
    max_share: float = identity(0.3, ge=0, le=1)


FilterSpec = Annotated[LengthFilter | AlphabeticFilter | RepeatedLinesFilter, Field(discriminator="filter")]
