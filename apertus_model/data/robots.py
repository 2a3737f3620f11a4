"""Domains that exclude crawlers: reads their list, and looks hosts up in it.

Invariant: a domain stands for itself and its subdomains, compared label by label in lower case and Punycode,
never as a substring. Memory: about 150 bytes per listed domain and worker.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import fsspec

from infra.store.inputs import SourceError
from specs.filters import RobotsFilter
from specs.sources import resolve_url

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


class Robots:
    """The domains of one file that exclude one of the agents asked for."""

    def __init__(self, domains: frozenset[str]) -> None:
        self.domains = domains

    @staticmethod
    def load(spec: RobotsFilter) -> Robots:
        """Read once per process. SourceError when the file cannot be read, has no such columns, or lists
        nothing."""
        return _load(spec.domains, tuple(spec.agents))

    def listed(self, name: str) -> str | None:
        """The listed domain of a host (from `host`), or None."""
        labels = name.split(".")
        return next(
            (domain for start in range(len(labels)) if (domain := ".".join(labels[start:])) in self.domains),
            None,
        )


def host(address: str) -> str | None:
    """The host of a URL (a scheme may be left out), normalised; None when there is none."""
    try:
        name = urlsplit(address if "//" in address else f"//{address}").hostname
    except ValueError:
        return None
    return _normal(name) if name and not any(map(str.isspace, name)) else None


def _normal(name: str) -> str:
    name = name.strip().strip(".").lower()
    try:
        return name if name.isascii() else name.encode("idna").decode()
    # labels that are too long or empty: such a host does not exist, but a list or a document may name it
    except UnicodeError:
        return name


@lru_cache(maxsize=4)
def _load(url: str, agents: tuple[str, ...]) -> Robots:
    wanted = {_product(agent) for agent in agents}
    try:
        with fsspec.open(resolve_url(url), "rb", compression="infer") as file:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            listed = (
                domain for domain, agent in _rows(url, text) if agent is None or _product(agent) in wanted
            )
            domains = frozenset(found for domain in listed if (found := host(domain.removeprefix("*."))))
    except SourceError:
        raise
    # filesystems and decompressors of third parties raise errors of their own kinds
    except Exception as error:
        raise SourceError(f"cannot read the domains in '{url}': {type(error).__name__}: {error}") from error
    if not domains:
        raise SourceError(
            f"'{url}' lists no domain for the agents {', '.join(agents)}. Fix: the file, or agents"
        )
    return Robots(domains)


def _product(agent: str) -> str:
    """`CCBot/2.0` -> `ccbot`: the product token, which is compared without case (RFC 9309, section 2.2.1)."""
    return agent.strip().split("/")[0].lower()


def _rows(url: str, text: io.TextIOWrapper) -> Iterator[tuple[str, str | None]]:
    """Domains, with the agent that each excludes; None in a list that does not say."""
    path = PurePosixPath(url)
    suffix = (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix
    if suffix == ".csv":
        rows = csv.DictReader(text)
        if not {"domain", "agent"} <= set(rows.fieldnames or ()):
            raise SourceError(
                f"'{url}' has the columns {', '.join(rows.fieldnames or ())}; domain and agent are needed"
            )
        yield from ((row["domain"] or "", row["agent"] or "") for row in rows)
    elif suffix == ".jsonl":
        for number, line in enumerate(filter(str.strip, text), start=1):
            row = json.loads(line)
            if not isinstance(row, dict) or not {"domain", "agent"} <= set(row):
                raise SourceError(f"'{url}', row {number}: no object with the keys domain and agent")
            yield str(row["domain"]), str(row["agent"])
    else:
        yield from ((line.split("#")[0].strip(), None) for line in text)
