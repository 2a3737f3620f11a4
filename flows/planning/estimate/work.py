"""Describes the work that a part asks of its model to sample or score: requests, tokens and FLOPs.

Numbers come from stored results of the part, or of the part with its name in the last run (`measured`); from
the recipe (`declared`); or are the most that its settings allow (`at most`).

Invariant: a number that nothing states is not guessed: the part is then not counted and says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from flows.planning.graph import Graph, Node
from flows.planning.run_records import Records
from infra.store import Artifact, Store, StoreError
from infra.store.documents import Manifest
from specs.model import ModelSpec
from specs.stages.export import ExportPart
from specs.stages.hugging_face import ModelFolderPart

SOURCES = ("measured", "declared", "files", "at most")  # the least certain last


class Number(NamedTuple):
    """A number and its source, one of `SOURCES`."""

    value: float
    source: str


class Decoding(NamedTuple):
    """Completions with a key-value cache, by one replica of a model on GPUs of a node."""

    model: ModelSpec
    sequences: float
    in_flight: int  # the most sequences at a time
    prompt: float  # mean tokens
    tokens: float  # steps of a sequence


class ModelWork(NamedTuple):
    """The work that one part asks of its model."""

    requests: float = 0  # prompts, sequences or rows
    read_tokens: float = 0  # of forward passes, prefill included
    sampled_tokens: float = 0
    forward_flops: int = 0
    decode_flops: int = 0
    source: str = SOURCES[0]
    width: int = 4  # bytes of an element in matrix products
    decoding: Decoding | None = None
    missing: str = ""  # what is not counted

    def __add__(self, other: ModelWork) -> ModelWork:  # type: ignore[override]  # a sum of fields, not of tuples
        """The work of both, one after the other, with the width of the first."""
        return self._replace(
            requests=self.requests + other.requests,
            read_tokens=self.read_tokens + other.read_tokens,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
            forward_flops=self.forward_flops + other.forward_flops,
            source=weakest([self.source, other.source]),
        )


class Opened(NamedTuple):
    """A model that a part asks."""

    model: ModelSpec
    dtype: str  # of its weights


class SuiteRequests(NamedTuple):
    """The total requests of a suite of tasks, and their tokens."""

    requests: float
    read_tokens: float
    sampled_tokens: float


class NotCounted(Exception):
    """An error whose message names the numbers that nothing states."""


def weakest(sources: Iterable[str]) -> str:
    return max(sources, key=SOURCES.index)


class Known:
    """The known facts about the parts of a plan."""

    def __init__(self, graph: Graph, store: Store, records: Records) -> None:
        self.graph, self.store, self.records = graph, store, records
        self._manifests: dict[str, Manifest | None] = {}  # by path

    def manifest(self, node: Node, *, same: bool = False) -> Manifest | None:
        """The manifest of the stored result of a part, or, unless `same`, of the part with its name in the
        last run; None if there is none, or if it is damaged."""
        if (stored := self._stored(node.path)) is not None or same:
            return stored
        last = self.records.last(node.name)
        return None if last is None else self._stored(last.path)

    def _stored(self, path: str) -> Manifest | None:
        if path not in self._manifests:
            try:
                self._manifests[path] = Artifact(self.store, path).manifest_if_complete()
            except StoreError:
                self._manifests[path] = None
        return self._manifests[path]

    def metric(self, node: Node, name: str, *, same: bool = False) -> float | None:
        """A number among the metrics of `manifest`."""
        manifest = self.manifest(node, same=same)
        value = manifest.metrics.get(name) if manifest is not None else None
        return float(value) if isinstance(value, (int, float)) else None

    def input(self, node: Node, role: str) -> Node:
        """The part that a part reads in this role."""
        return self.graph.nodes[node.inputs[role].node or ""]

    def model(self, node: Node) -> Opened:
        """The model that a part asks: an exported one, or the folder of another architecture."""
        model = node.inputs.get("model")
        part = self.graph.nodes[model.node or ""].part if model is not None else None
        if isinstance(part, ExportPart):
            return Opened(part.model, part.dtype)
        if not isinstance(part, ModelFolderPart):
            raise NotCounted("the model of a server")
        if part.shape is None:
            raise NotCounted(f"the dimensions of {part.reference} (assumed_inputs.models)")
        return Opened(part.shape, part.dtype)


Count = Callable[[Known, Node], ModelWork | None]
"""Returns the work of a part, None if it has none. Raises NotCounted if a number is not stated."""
