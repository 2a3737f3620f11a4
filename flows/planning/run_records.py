"""The records of runs in the store: the parts of a pipeline's last run, those of all last runs, and protected
parts.

Invariant: a damaged record costs an explanation, never a plan, whose notes name the record. Only a protected
stage does not run then.
"""

from contextlib import suppress
from functools import cached_property
from typing import Any

from flows.planning.graph import Graph, Node
from infra.store import Artifact, Store, StoreError, runs
from infra.store.documents import Protected, RunEnd


class Records:
    """The records of the runs of one pipeline."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self.store = store
        self.pipeline = pipeline
        self.problem = ""  # of the record of the last run, if it is damaged

    @cached_property
    def _last(self) -> runs.RunRecord | None:
        stamps = runs.stamps(self.store, self.pipeline)
        try:
            return runs.read(self.store, self.pipeline, stamps[-1]) if stamps else None
        except StoreError as error:
            self.problem = str(error)
            return None

    def last(self, name: str) -> Artifact | None:
        """The artifact of the part with this name in the last run."""
        entry = self._last.parts.get(name) if self._last else None
        return Artifact(self.store, *entry) if entry else None

    @cached_property
    def in_use(self) -> list[str]:
        """The artifacts to which the last record of any pipeline refers: of this one, then of the others, the
        newest record first."""
        last = [
            (run == self.pipeline, stamps[-1], run)
            for run in self.store.names(runs.FOLDER)
            if (stamps := runs.stamps(self.store, run))
        ]
        paths: list[str] = []
        for _, stamp, run in sorted(last, reverse=True):
            with suppress(StoreError):
                paths += (path for path, _ in runs.read(self.store, run, stamp).parts.values())
        return paths

    def protect(self, node: Node) -> None:
        """Records, outside the artifact, that a part of a protected stage has finished, so that its loss is
        noticed."""
        document = Protected(name=node.name, path=node.path, step=node.end_step)
        self.store.write_document(runs.protected_mark(node.path, node.end_step), document)

    def had_finished(self, path: str, step: int | None) -> bool:
        """Whether `protect` has recorded an artifact."""
        return self.store.exists(runs.protected_mark(path, step))

    def write(self, graph: Graph, spec: dict[str, Any], end: RunEnd | None = None) -> None:
        """Records that a run refers to these parts; `spec` is the resolved recipe."""
        runs.write(self.store, self.pipeline, _parts(graph), spec, end)

    def keep(self, graph: Graph, spec: dict[str, Any], end: RunEnd | None = None) -> None:
        """Writes a record, unless the last one refers to the same parts and, if the run has ended, ended in
        the same way."""
        last = self._last
        ended = end is not None and (last is None or last.end is None or last.end.outcome != end.outcome)
        if last is None or last.parts != _parts(graph) or ended:
            self.write(graph, spec, end)


def _parts(graph: Graph) -> dict[str, tuple[str, int | None]]:
    return {node.name: (node.path, node.end_step) for node in graph.nodes.values()}
