"""The filter that applies robots.txt, and the snapshots that it reads.

Invariant: the location of the files is not an identity field; how they are read is. The planner fingerprints
their content.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from specs.base import Spec, execution, identity, location, option
from specs.filter_bases import DocumentFilter, Missing, missing_value, outside
from specs.sources import TABLES, SourceSpec, Url, usual_globs

# The crawlers of AI companies, and `*` for all (swiss-ai/pretrain-data, robots_filter.py).
ROBOTS_AGENTS = [
    "AI2Bot",
    "Applebot-Extended",
    "Bytespider",
    "CCBot",
    "ClaudeBot",
    "cohere-training-data-crawler",
    "Diffbot",
    "FacebookBot",
    *("Google-Extended", "GPTBot", "Meta-ExternalAgent", "PanguBot", "*"),
]
COLUMNS = ("url_column", "text_column", "status_column", "date_column")


class RobotsSource(Spec):
    """Stored answers to requests for robots.txt.

    `warc`: records of type `response`, with their status and date, as Common Crawl stores them. `jsonl`,
    `parquet`, `arrow`: a row is an answer. Answers to addresses other than `/robots.txt` are ignored, and so
    are redirects (3xx): their target is an answer of its own. An address without a path is that of a host.
    """

    url: Url = location(min_length=1, description="folder or file on any fsspec URL")
    format: Literal["warc", "jsonl", "parquet", "arrow"] = identity()
    include: list[str] = execution(
        default_factory=lambda: ["**/*"],
        description="globs below the url; the suffixes of parquet, arrow and warc by default",
    )
    url_column: str = option(
        "url", description="in a table: column with the address; an address without a scheme counts as https"
    )
    text_column: str = option(
        "text", description="in a table: column with the content; null where there was no answer"
    )
    status_column: str | None = option(
        None,
        description="in a table: column with the HTTP status. 2xx: the rules of the content; 4xx: all is"
        " allowed (RFC 9309); any other: an error. Without the column, or without a value, a content counts"
        " as 200, and its absence as an error",
    )
    date_column: str | None = option(
        None,
        description="in a table: column with the time of the request, as a time or in ISO 8601; UTC where it"
        " has no zone",
    )

    _usual_globs = model_validator(mode="before")(usual_globs)

    def conflicts(self) -> Iterator[str]:
        if self.format not in TABLES and (columns := [n for n in COLUMNS if n in self.model_fields_set]):
            yield f"{columns[0]} belongs to {' and '.join(TABLES)}; this is {self.format}"
        named = [name for column in COLUMNS if (name := getattr(self, column)) is not None]
        if twice := sorted({name for name in named if named.count(name) > 1}):
            yield f"two of {', '.join(COLUMNS)} are '{twice[0]}'; name each column once"

    @property
    def files(self) -> SourceSpec:
        """The files as a source. A row of a table is read as a document: its text is the address."""
        if self.format not in TABLES:
            return SourceSpec(url=self.url, format=self.format, include=self.include)
        others = (self.text_column, self.status_column, self.date_column)
        return SourceSpec(
            url=self.url,
            format=self.format,
            include=self.include,
            text_column=self.url_column,
            metadata=[name for name in others if name is not None],
        )


class RobotsFilter(DocumentFilter):
    """Drops documents whose address robots.txt has since closed to one of the agents, as RFC 9309 reads it.

    An agent obeys all groups that name it (ignoring case and version), and the groups of `*` if none does;
    `*` as an agent stands for a crawler that no group names. The longest matching rule decides, and `Allow`
    wins between equally long ones. The first 500 KiB are read. Content without rules, such as an HTML page,
    closes nothing. For a host with several answers, errors count only if there is nothing else.

    `domains` is a list of hosts that are excluded as a whole, as swiss-ai published it: `example.org`
    excludes `www.example.org`, while `blog.example.org` does not exclude `example.org`.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ("column",)
    filter: Literal["robots"] = identity()
    snapshots: list[RobotsSource] = option(
        default_factory=list, description="stored robots.txt files; or `domains`"
    )
    domains: Url | None = location(
        None,
        min_length=1,
        description="file on any fsspec URL, plain or compressed (.gz, .zst, ...): `*.csv` with the columns"
        " `domain` and `agent`, or `*.jsonl` with these keys: rows with one of `agents` count; any other file"
        " has one domain per line, and `#` begins a comment",
    )
    agents: list[Annotated[str, Field(pattern=r"^\s*(\*|[A-Za-z0-9_-]+(/.*)?)\s*$")]] = identity(
        default_factory=lambda: list(ROBOTS_AGENTS),
        min_length=1,
        description="crawlers whose exclusion counts; the published ones by default",
    )
    scope: Literal["site", "origin"] = option(
        "site",
        description="`origin`: an address obeys the answer of its own scheme, host and port (RFC 9309)."
        " `site`: if that has none, an address without a port obeys the answer of the other of http and"
        " https, then of the host with or without `www.`: hosts redirect between these, and snapshots hold"
        " one",
    )
    several: Literal["latest", "any"] = option(
        "latest",
        description="which of several answers for a host count: those of the latest date, or any that"
        " excludes; without dates all are of one date",
    )
    unreached: Literal["keep", "drop"] = option("keep", description="documents of hosts without an answer")
    errors: Literal["keep", "drop"] = option(
        "keep",
        description="documents of hosts with nothing but errors; RFC 9309 asks crawlers to stay away: drop",
    )
    column: str = option("url", description="holds the document's address")
    missing: Missing = missing_value()

    def conflicts(self) -> Iterator[str]:
        if (self.domains is None) == (not self.snapshots):
            yield "set either `snapshots` (robots.txt files) or `domains` (a list of hosts)"
        of_snapshots = {"scope", "several", "unreached", "errors"} & self.model_fields_set
        if self.domains is not None and of_snapshots:
            yield f"{min(of_snapshots)} belongs to snapshots; `domains` lists hosts only"

    def files(self) -> list[SourceSpec]:
        return (
            [source.files for source in self.snapshots] if self.domains is None else [outside(self.domains)]
        )
