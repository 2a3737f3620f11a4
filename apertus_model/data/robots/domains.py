"""Reads a list of domains that exclude crawlers, and looks hosts up in it.

Invariant: a domain stands for itself and its subdomains, compared label by label in lower case and Punycode,
never as a substring. Memory: about 150 bytes per listed domain and worker.
"""

import csv
import io
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import PurePosixPath

import fsspec

from apertus_model.data.documents.addresses import Address, parse
from apertus_model.data.documents.compressed import SUFFIXES, decompressed
from apertus_model.data.robots.rules import LISTED, Exclusion, product
from infra.store.inputs import SourceError
from specs.sources import resolve_url


class ListedDomains:
    """The domains of one file that exclude one of the agents asked for."""

    def __init__(self, domains: frozenset[str]) -> None:
        self.domains = domains

    def excluded(self, address: Address) -> Exclusion | None:
        """The exclusion of an address by a listed domain, or None."""
        parts = address.host.split(".")
        for start in range(len(parts)):
            if (domain := ".".join(parts[start:])) in self.domains:
                return Exclusion(domain, (LISTED,), f"not below {domain}, which excludes crawlers")
        return None


@lru_cache(maxsize=4)
def load_domains(url: str, agents: tuple[str, ...]) -> ListedDomains:
    """Reads the file once per process. SourceError when it cannot be read, lacks the columns `domain` and
    `agent`, or lists no domain for the agents."""
    wanted = {product(agent) for agent in agents}
    try:
        with fsspec.open(resolve_url(url), "rb") as file:
            text = io.TextIOWrapper(decompressed(file, url), encoding="utf-8-sig", newline="")
            listed = (
                domain for domain, agent in _rows(url, text) if agent is None or product(agent) in wanted
            )
            domains = frozenset(
                address.host for domain in listed if (address := parse(domain.removeprefix("*."))) is not None
            )
    except SourceError:
        raise
    # filesystems and decompressors of third parties raise errors of their own kinds
    except Exception as error:
        raise SourceError(f"cannot read the domains in '{url}': {type(error).__name__}: {error}") from error
    if not domains:
        raise SourceError(
            f"'{url}' lists no domain for the agents {', '.join(agents)}. Fix: correct the file, or agents"
        )
    return ListedDomains(domains)


def _rows(url: str, text: io.TextIOWrapper) -> Iterator[tuple[str, str | None]]:
    """The domains, each with the agent that it excludes, or None in a list that names no agents."""
    path = PurePosixPath(url)
    suffix = (path.with_suffix("") if path.suffix in SUFFIXES else path).suffix
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
