"""The graph of parts, with fingerprints and inputs, that `flows.planning.parts` makes from a recipe.

Invariant: a part's fingerprint is a pure function of its resolved spec and of its inputs' fingerprints. Names
of stages, places and resources do not enter it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flows.planning.unavailable import Unavailable
from infra.store import Artifact, Store, documents
from infra.store.hugging_face import HubModel
from infra.store.inputs import Listing
from specs.base import fingerprint, hashed_input
from specs.dependencies import uses
from specs.launch import Launch
from specs.pipeline import Pipeline
from specs.stages.base import Part
from specs.stages.training import Segment
from specs.trajectory import Trajectory
from specs.units import Reference

TOKENIZER = " (tokenizer)"  # suffix of the name of the tokenizer files of a Hugging Face model
FOLDER = " (folder)"  # suffix of the name of the folder of a Hugging Face model that is kept as it is


@dataclass(frozen=True)
class Input:
    """An input of a part. Two are equal when they contribute the same to the fingerprint of a part, whatever
    their names."""

    kind: str = field(compare=False)  # of the part that makes it; `external`: documents outside the store
    fingerprint: str
    name: str = field(compare=False)
    node: str | None = field(default=None, compare=False)  # the part of the plan that makes it
    step: int | None = None  # of a checkpoint

    @classmethod
    def stored(cls, input_: documents.InputRecord) -> Input:
        """An input as an artifact in the store states it."""
        kind, _, fingerprint = (input_.place or f"{input_.kind}/{input_.fingerprint}").rpartition("/")
        return cls(kind, fingerprint, input_.name or input_.place or fingerprint[:8], step=input_.step)

    @property
    def place(self) -> str | None:
        """The folder of the artifact in the store; None for documents outside it."""
        return None if self.kind == "external" else f"{self.kind}/{self.fingerprint}"

    @property
    def label(self) -> str:
        return self.name if self.step is None else f"{self.name}@step={self.step}"

    @property
    def hashed(self) -> str:
        """The form of the input in the fingerprint of the part that reads it."""
        return hashed_input(self.fingerprint, self.step)


@dataclass(frozen=True)
class Node:
    """One part of a stage: it has a fingerprint, and is run, stored and reused as a whole."""

    name: str
    stage: str
    kind: str  # of the part, which may differ from the stage's
    version: int
    part: Part
    inputs: dict[str, Input]
    launch: Launch
    start_step: int = 0  # of a segment, which makes the steps after this one
    end_step: int | None = None
    tokens: int = 0
    flops: int = 0
    phase: str = ""  # of a segment

    @property
    def segment(self) -> Segment | None:
        """The part as a segment of training; None for any other part."""
        return self.part if isinstance(self.part, Segment) else None

    @property
    def imported(self) -> bool:
        """Whether the part is a checkpoint that is made of a Hugging Face model."""
        return self.kind == "import_model"

    @property
    def identity(self) -> dict[str, Any]:
        return self.part.identity_fields()

    @cached_property
    def fingerprint(self) -> str:
        hashed = {role: input_.hashed for role, input_ in self.inputs.items()}
        return fingerprint(self.kind, self.version, self.identity, hashed)

    @property
    def path(self) -> str:
        return f"{self.kind}/{self.fingerprint}"

    def artifact(self, store: Store) -> Artifact:
        """The artifact of the part, finished or not; for training, with the manifest of the part's end."""
        return Artifact(store, self.path, self.end_step)

    def kept_steps(self, store: Store) -> list[int]:
        """The part's steps whose checkpoints are stored; the trajectory may continue after its end."""
        stored = self.artifact(store).checkpoint_steps()
        return [step for step in stored if self.start_step < step <= (self.end_step or 0)]

    @property
    def steps(self) -> int:
        return (self.end_step or 0) - self.start_step

    def tokens_until(self, step: int) -> int:
        """The tokens of the part up to one of its steps, which all have equally many tokens."""
        return self.tokens * (step - self.start_step) // self.steps if self.steps else 0


@dataclass
class Graph:
    """All parts of a recipe, inputs first."""

    nodes: dict[str, Node] = field(default_factory=dict)
    listings: dict[str, Listing] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    after: dict[str, tuple[str, ...]] = field(default_factory=dict)  # stage -> stages under its `after:`
    notes: list[str] = field(default_factory=list)  # for readers of the plan
    tasks: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # suite -> name -> its tasks
    trajectories: dict[str, Trajectory] = field(default_factory=dict)  # by phase
    best: dict[str, int] = field(default_factory=dict)  # its current step, by `@best:` reference
    models: dict[str, HubModel] = field(default_factory=dict)  # `hf:` reference -> the Hugging Face model
    unavailable: dict[str, Unavailable] = field(default_factory=dict)  # declared inputs by name

    def waits_for(self) -> dict[str, tuple[str, ...]]:
        """For each part, the unavailable inputs that it reads, directly or through other parts."""
        waiting: dict[str, tuple[str, ...]] = {}
        for name, node in self.nodes.items():  # inputs first
            lists = [
                waiting[input_.node] if input_.node else (input_.name,) for input_ in node.inputs.values()
            ]
            waiting[name] = tuple(
                dict.fromkeys(
                    unavailable for names in lists for unavailable in names if unavailable in self.unavailable
                )
            )
        return waiting

    def provisional(self, pipeline: Pipeline) -> set[str]:
        """The parts whose fingerprints will change, since they depend on an `@best:` reference or a selection
        that is not known yet, or on unavailable inputs."""

        def unknown(ref: Reference) -> bool:
            stage = pipeline.stages.get(ref.stage)
            chosen = stage is not None and stage.kind == "select"
            return (ref.best is not None and str(ref) not in self.best) or (
                chosen and ref.stage not in self.best
            )

        stages = {
            name
            for name, stage in pipeline.stages.items()
            if any(unknown(use.reference) for use in uses(name, stage))
        }
        unknown_parts = {name for name, unavailable in self.waits_for().items() if unavailable}
        for name, node in self.nodes.items():  # inputs first
            if node.stage in stages or unknown_parts & {*self.parents(node)}:
                unknown_parts.add(name)
        return unknown_parts

    def starts(self, pipeline: Pipeline) -> list[tuple[Node, Node, int]]:
        """Every known checkpoint that a part reads, as (part, part that makes the checkpoint, step)."""
        nodes, provisional = self.nodes, self.provisional(pipeline)
        return [
            (node, nodes[input_.node], input_.step)
            for name, node in nodes.items()
            for input_ in node.inputs.values()
            if name not in provisional and input_.node is not None and input_.step is not None
        ]

    def plan_depends_on(self, node: Node, pipeline: Pipeline) -> bool:
        """Whether the result of a part can change the plan of other parts."""
        if node.part.PLAN_DEPENDS:
            return True
        references = (use.reference for name, stage in pipeline.stages.items() for use in uses(name, stage))
        return any(ref.best is not None and ref.stage == node.stage for ref in references)

    def of(self, stage: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.stage == stage]

    def part(self, ref: Reference) -> Node:
        """The part that a reference names, which is no checkpoint; the last one of its stage if it names
        none."""
        nodes = self.of(ref.stage)
        named = f"{ref.stage}/{ref.part}"
        return next((node for node in nodes if ref.part is not None and node.name == named), nodes[-1])

    def parent(self, node: Node) -> tuple[Node | None, int]:
        """The part that makes the checkpoint from which a segment starts, and its step."""
        parent = node.inputs.get("parent")
        return (self.nodes[parent.node], parent.step or 0) if parent and parent.node else (None, 0)

    def segments(self, phase: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.phase == phase]

    @cached_property
    def duplicates(self) -> dict[str, str]:
        """Every part that shares the work of an earlier part, with the first part that does this work. It is
        computed once: read it when all parts are there."""
        first: dict[tuple[str, int | None], str] = {}
        names = {
            node.name: first.setdefault((node.path, node.end_step), node.name) for node in self.nodes.values()
        }
        return {name: other for name, other in names.items() if name != other}

    def ends_of(self, stage: str) -> list[str]:
        """The parts of a stage that none of its parts reads: the last of a chain, or all of a corpus."""
        parts = self.of(stage)
        parents = {name for part in parts for name in self.parents(part)}
        return [part.name for part in parts if part.name not in parents]

    def parents(self, node: Node) -> list[str]:
        return [input_.node for input_ in node.inputs.values() if input_.node is not None]
