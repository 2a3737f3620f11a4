"""Pins the fingerprints of every part of every shipped recipe. What changes one makes everybody's stored part
again, and all that was made from it: `python -m tools.fingerprints > tests/fingerprints.json`

The digest of files outside the store is replaced by one of their name, so that the pins are the same on every
machine.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from unittest.mock import patch

from flows.planning.graph import Graph
from flows.planning.plan import make
from infra.store import Store
from specs.pipeline import Pipeline
from specs.recipe import load

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "specs" / "recipes").glob("*.yaml"))


class _Digests(dict[str, str]):
    """Digests by the names of files."""

    def __setitem__(self, name: str, digest: str) -> None:
        super().__setitem__(name, hashlib.sha256(name.replace(str(ROOT), "").encode()).hexdigest())


def pinned(recipe: Pipeline) -> dict[str, str]:
    """The fingerprint of each part of a recipe, inputs first."""
    named = patch("flows.planning.parts.builder.Graph", lambda: Graph(digests=_Digests()))
    with tempfile.TemporaryDirectory() as store, named:
        nodes = make(recipe, Store.open(store), ask_network=False).graph.nodes
    return {name: node.fingerprint for name, node in nodes.items()}


if __name__ == "__main__":
    print(json.dumps({recipe.stem: pinned(load(recipe)) for recipe in RECIPES}, indent=1))
