"""Declared inputs that are unavailable, and the harness if it is not installed.

Invariant: their digests are provisional, computed from url and globs; nothing is stored or looked up under
them.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from specs.base import canonical_json
from specs.errors import FieldPath
from specs.sources import Declared, SourceSpec, resolve_url


@dataclass(frozen=True)
class Unavailable:
    """An unavailable input outside the store."""

    url: str
    reason: str
    path: FieldPath  # where the recipe states the input
    size: Declared | None = None  # the declared size of a source
    install: str = ""  # the command that installs it, for a package

    def to_json(self) -> dict[str, Any]:
        tokens = self.size.tokens.amount if self.size and self.size.tokens else None
        return {
            "url": self.url,
            "reason": self.reason,
            "tokens": tokens,
            "documents": self.size.documents if self.size else None,
        }


def provisional(source: SourceSpec) -> str:
    """The provisional digest of unavailable files, which depends only on their url and globs."""
    place = canonical_json([source.url, source.include, source.exclude])
    return f"declared:{hashlib.sha256(place.encode()).hexdigest()[:23]}"


def is_local(url: str) -> bool:
    """Whether a url can be listed without the network."""
    resolved = resolve_url(url)
    return "://" not in resolved or resolved.startswith("file://")
