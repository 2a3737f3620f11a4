"""The runs of one pipeline as the store records them: what the last one referred to, and which parts are protected.

Invariant: a damaged record costs an explanation, never a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flows.planning.graph import Graph, Node
from infra.store import Artifact, Store, StoreError, runs
from infra.store.documents import Protected, to_json


@dataclass(frozen=True)
class Record:
    """What the last run referred to under a name."""

    store: Store
    path: str
    step: int | None

    @property
    def complete(self) -> bool:
        return Artifact(self.store, self.path, self.step).complete


class Records:
    """The runs of one pipeline, newest first."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self.store = store
        self.pipeline = pipeline

    @cached_property
    def _last(self) -> dict[str, tuple[str, int | None]]:
        stamps = runs.stamps(self.store, self.pipeline)
        try:
            return runs.read(self.store, self.pipeline, stamps[-1]).parts if stamps else {}
        except StoreError:
            return {}

    def last(self, name: str) -> Record | None:
        """The part of that name in the last run."""
        entry = self._last.get(name)
        return Record(self.store, *entry) if entry else None

    def protect(self, node: Node) -> None:
        """Notes, outside the artifact, that a part of a protected stage has finished, so that its loss is noticed."""
        document = Protected(name=node.name, path=node.path, step=node.end_step)
        self.store.write_once(runs.protected_mark(node.path, node.end_step), to_json(document))

    def had_finished(self, path: str, step: int | None) -> bool:
        """Whether `protect` was told of an artifact."""
        return self.store.exists(runs.protected_mark(path, step))

    def write(self, graph: Graph, spec: dict[str, Any]) -> None:
        """Records that a run refers to these parts; `spec` is the recipe as resolved."""
        runs.write(self.store, self.pipeline, _parts(graph), spec)

    def keep(self, graph: Graph, spec: dict[str, Any]) -> None:
        """The same, unless the last record refers to the same parts."""
        if self._last != _parts(graph):
            self.write(graph, spec)


def _parts(graph: Graph) -> dict[str, tuple[str, int | None]]:
    return {node.name: (node.path, node.end_step) for node in graph.nodes.values()}
