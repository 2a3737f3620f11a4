"""One input that a recipe declares and that is unavailable.

Invariant: its digest is provisional, made of where it would lie; nothing is stored or looked for under it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from specs.base import canonical_json
from specs.errors import FieldPath
from specs.sources import Declared, SourceSpec, resolve_url


@dataclass(frozen=True)
class Unavailable:
    """Something outside the store that is unavailable. `path`: where the recipe states its url; `size`: of a source, as declared."""

    url: str
    reason: str
    path: FieldPath
    size: Declared | None = None

    def to_json(self) -> dict[str, Any]:
        tokens = self.size.tokens.amount if self.size and self.size.tokens else None
        return {"url": self.url, "reason": self.reason, "tokens": tokens, "documents": self.size.documents if self.size else None}


def provisional(source: SourceSpec) -> str:
    """What stands for the digest of files that nobody has seen: the same for the same place and globs."""
    place = canonical_json([source.url, source.include, source.exclude])
    return f"declared:{hashlib.sha256(place.encode()).hexdigest()[:23]}"


def is_local(url: str) -> bool:
    """Whether listing a url asks no network."""
    resolved = resolve_url(url)
    return "://" not in resolved or resolved.startswith("file://")
