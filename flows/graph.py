"""From a recipe to parts with fingerprints.

Invariant: a part's fingerprint is a pure function of its resolved spec and of its inputs' fingerprints. Names of stages, and where things
lie or run, do not enter it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from infra.store import Store
from infra.store.inputs import Listing, SourceError, list_source, locked_digest
from specs.base import Spec, fingerprint
from specs.errors import FieldPath, Problem, SpecError
from specs.launch import Checkpointing, Launch, Parallel
from specs.pipeline import Pipeline, order
from specs.sources import SourceSpec
from specs.stages.base import FromCheckpoint, Stage
from specs.stages.cooldown import CooldownStage
from specs.stages.corpus import CorpusPart, CorpusSource, CorpusStage
from specs.stages.evaluate import EvaluatePart, EvaluateStage
from specs.stages.export import ExportPart, ExportStage
from specs.stages.mixture import MixturePart, MixtureStage
from specs.stages.tokenizer import TokenizerPart, TokenizerStage
from specs.stages.training import Segment, TrainingStage
from specs.trajectory import Trajectory, branch, resolve
from specs.units import Reference


@dataclass(frozen=True)
class Input:
    """What a part reads: another part (`node`), at a step if it is a checkpoint, or documents outside the store (`node` is None)."""

    kind: str
    fingerprint: str
    name: str
    node: str | None = None
    step: int | None = None

    @property
    def hashed(self) -> str:
        """What enters the fingerprint of the part that reads it."""
        return self.fingerprint if self.step is None else f"{self.fingerprint}@{self.step}"


@dataclass(frozen=True)
class Node:
    """One part of a stage: what has a fingerprint, and is run, stored and reused as a whole."""

    name: str
    stage: str
    kind: str
    version: int
    part: Spec
    inputs: dict[str, Input]
    launch: Launch
    start_step: int | None = None
    end_step: int | None = None
    tokens: int = 0
    flops: int = 0

    @property
    def identity(self) -> dict[str, Any]:
        return self.part.identity_fields()

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.kind, self.version, self.identity, {role: read.hashed for role, read in self.inputs.items()})

    @property
    def path(self) -> str:
        """Folder of the artifact in the store."""
        return f"{self.kind}/{self.fingerprint}"

    @property
    def steps(self) -> int:
        return (self.end_step or 0) - (self.start_step or 0)


@dataclass
class Graph:
    """All parts, inputs first. `notes` are things a reader of the plan should know."""

    nodes: dict[str, Node] = field(default_factory=dict)
    listings: dict[str, Listing] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    after: dict[str, tuple[str, ...]] = field(default_factory=dict)  # stage -> what it names under `after:`
    notes: list[str] = field(default_factory=list)
    trajectories: dict[str, Trajectory] = field(default_factory=dict)

    def of(self, stage: str) -> list[Node]:
        """The parts of a stage, in order."""
        return [node for node in self.nodes.values() if node.stage == stage]

    def ends_of(self, stage: str) -> list[str]:
        """The parts of a stage that no other part of it reads: the last of a chain, all parts of a corpus."""
        parts = self.of(stage)
        read = {name for part in parts for name in self.parents(part)}
        return [part.name for part in parts if part.name not in read]

    def parents(self, node: Node) -> list[str]:
        """Names of the parts that a part reads."""
        return [read.node for read in node.inputs.values() if read.node is not None]


def build(pipeline: Pipeline, store: Store, on_read: Callable[[str, Listing], None] = lambda name, listing: None) -> Graph:
    """Resolves a checked pipeline. `on_read` is told of each source that has to be read for its digest. SpecError with every problem."""
    names = order(pipeline)
    builder = _Builder(pipeline, store, on_read)
    builder.graph.trajectories = resolve(pipeline, names)
    for name in names:
        builder.add(name, pipeline.stages[name])
        builder.graph.after[name] = tuple(pipeline.stages[name].after)
    if builder.problems:
        raise SpecError(builder.problems)
    return builder.graph


class _Builder:
    """Adds stages in order; each `_add_<kind>` makes the parts of one."""

    def __init__(self, pipeline: Pipeline, store: Store, on_read: Callable[[str, Listing], None]) -> None:
        self.pipeline = pipeline
        self.store = store
        self.on_read = on_read
        self.graph = Graph()
        self.problems: list[Problem] = []

    def add(self, name: str, stage: Stage) -> None:
        if isinstance(stage, TokenizerStage):
            self._add_tokenizer(name, stage)
        elif isinstance(stage, CorpusStage):
            self._add_corpus(name, stage)
        elif isinstance(stage, MixtureStage):
            self._add_mixture(name, stage)
        elif isinstance(stage, TrainingStage):
            self._add_training(name, stage)
        elif isinstance(stage, EvaluateStage):
            self._add_evaluate(name, stage)
        elif isinstance(stage, ExportStage):
            self._add_export(name, stage)
        else:
            raise TypeError(f"the planner does not know stages of kind {stage.kind}")

    def _node(self, name: str, stage_name: str, part: Spec, inputs: dict[str, Input], **numbers: int) -> Node:
        stage = self.pipeline.stages[stage_name]
        launch = self.pipeline.launch_of(stage)
        node = Node(name, stage_name, stage.kind, type(stage).VERSION, part, inputs, launch, **numbers)
        self.graph.nodes[name] = node
        return node

    def _documents(self, name: str) -> Input:
        """A source, by the digest of what it holds."""
        if name not in self.graph.digests:
            try:
                listing = list_source(self.pipeline.sources[name])
                digest = locked_digest(self.store, listing)
                if digest is None:
                    self.on_read(name, listing)
                    digest = listing.digest()
                self.graph.listings[name] = listing
            except SourceError as error:
                self.problems.append(Problem(("sources", name), str(error), "correct the url or the globs."))
                digest = "unknown"
            self.graph.digests[name] = digest
        return Input("external", self.graph.digests[name], name)

    def _part(self, ref: Reference) -> Input:
        """An artifact that is not a checkpoint."""
        nodes = self.graph.of(ref.stage)
        node = next((node for node in nodes if ref.part is None or node.name == f"{ref.stage}/{ref.part}"), nodes[0])
        return Input(node.kind, node.fingerprint, node.name, node.name)

    def _checkpoint(self, ref: Reference, path: tuple[str, ...]) -> tuple[Input, Trajectory]:
        start = branch(ref, self.graph.trajectories, path)
        node = self.graph.of(start.stage)[start.segment]
        return Input(node.kind, node.fingerprint, node.name, node.name, start.step), self.graph.trajectories[start.stage]

    def _add_tokenizer(self, name: str, stage: TokenizerStage) -> None:
        inputs = {f"source:{index}": self._documents(source) for index, source in enumerate(stage.sources)}
        if stage.path is not None:
            inputs["folder"] = self._folder(name, stage.path)
        part = TokenizerPart(
            sources=[self.pipeline.sources[source] for source in stage.sources],
            path=stage.path,
            vocab_size=stage.vocab_size,
            reserved=stage.reserved,
            bytes_per_source=stage.bytes_per_source,
        )
        self._node(name, name, part, inputs)

    def _folder(self, name: str, path: str) -> Input:
        try:
            listing = list_source(SourceSpec(url=path, format="text", include=["*.json", "*.jinja"]))
            digest = locked_digest(self.store, listing) or listing.digest()
            self.graph.listings[f"{name}.path"], self.graph.digests[f"{name}.path"] = listing, digest
        except (SourceError, ValueError) as error:
            self.problems.append(Problem(("stages", name, "path"), str(error), "name a folder with tokenizer.json."))
            digest = "unknown"
        return Input("external", digest, path)

    def _add_corpus(self, name: str, stage: CorpusStage) -> None:
        tokenizer = self._part(stage.tokenizer)
        for source, process in stage.sources.items():
            documents = self._documents(source)
            listing = self.graph.listings.get(source)
            part = CorpusPart(
                source=self.pipeline.sources[source],
                process=CorpusSource.model_validate(process),
                seed=stage.seed,
                files_per_task=stage.files_per_task,
                listing=[file.path for file in listing.files] if listing else [],
            )
            self._node(f"{name}/{source}", name, part, {"tokenizer": tokenizer, "documents": documents})

    def _add_mixture(self, name: str, stage: MixtureStage) -> None:
        chosen = [(self._part(Reference.parse(source)), weight.weight) for source, weight in stage.weights.items()]
        chosen.sort(key=lambda pair: pair[0].fingerprint)
        tokenizers = {self.graph.nodes[read.name].inputs["tokenizer"].name for read, _ in chosen}
        path = ("stages", name, "weights")
        if len({read.fingerprint for read, _ in chosen}) < len(chosen):
            self.problems.append(Problem(path, "two of these are the same corpus", "add their weights up."))
        if len(tokenizers) > 1:
            self.problems.append(Problem(path, f"corpora of different tokenizers: {', '.join(sorted(tokenizers))}", "use one tokenizer."))
        part = MixturePart(weights=[weight for _, weight in chosen], seed=stage.seed)
        self._node(name, name, part, {f"source:{index}": read for index, (read, _) in enumerate(chosen)})

    def _add_training(self, name: str, stage: TrainingStage) -> None:
        trajectory = self.graph.trajectories[name]
        parent: Input | None = None
        drawn: dict[tuple[str, int], int] = {}  # samples drawn so far, by mixture and length
        if trajectory.parent is not None:
            before = self.graph.of(trajectory.parent.stage)[trajectory.parent.segment]
            parent = Input(before.kind, before.fingerprint, before.name, before.name, trajectory.parent.step)
            if "data" in trajectory.carry:
                drawn = self._drawn_until(before, trajectory.parent.step)
        launch = self.pipeline.launch_of(stage)
        for index, cut in enumerate(trajectory.cuts):
            mixture = self._part(Reference.parse(cut.mixture))
            tokenizer = self._tokenizer_of(mixture, name, trajectory)
            if parent is not None:
                self._same_tokenizer(("stages", name, "mixture"), mixture.name, tokenizer, self._tokenizer_behind(parent))
            counter = (mixture.fingerprint, trajectory.sequence_length)
            segment = Segment(
                model=trajectory.model,
                seed=trajectory.seed if index == 0 and parent is None else None,
                sequence_length=trajectory.sequence_length,
                global_batch_size=cut.batch,
                sample_offset=drawn.get(counter, 0),
                start_step=cut.start_step,
                start_tokens=cut.start_sample * trajectory.sequence_length,
                carry=list(trajectory.carry) if index == 0 and parent is not None else [],
                optimizer=trajectory.optimizer,
                schedule=cut.schedule,
                goldfish=trajectory.goldfish,
                precision=trajectory.precision,
                end_step=cut.end_step,
                micro_batch_size=stage.micro_batch_size,
                attention=stage.attention,
                activation_checkpointing=stage.activation_checkpointing,
                compile=stage.compile,
                checkpoint=self._kept(name, stage.checkpoint),
                validation=stage.validation,
                source_names=[read.name for read in self.graph.nodes[mixture.name].inputs.values()],
                parallel=launch.parallel or Parallel(),
            )
            inputs = {"mixture": mixture, "tokenizer": tokenizer} | ({"parent": parent} if parent else {})
            tokens = cut.steps * segment.tokens_per_step
            node = self._node(
                f"{name}/{index + 1}" if len(trajectory.cuts) > 1 else name,
                name,
                segment,
                inputs,
                start_step=cut.start_step,
                end_step=cut.end_step,
                tokens=tokens,
                flops=tokens * trajectory.model.flops_per_token(trajectory.sequence_length),
            )
            drawn[counter] = drawn.get(counter, 0) + cut.end_sample - cut.start_sample
            parent = Input(node.kind, node.fingerprint, node.name, node.name, cut.end_step)
        if trajectory.leftover_tokens:
            self.graph.notes.append(
                f"{name}: {stage.budget} are {trajectory.steps} whole steps; {trajectory.leftover_tokens:,} tokens are left over"
            )

    def _kept(self, name: str, checkpoint: Checkpointing) -> Checkpointing:
        """Steps that other stages start from are milestones."""
        wanted = set(checkpoint.milestones)
        for other, stage in self.pipeline.stages.items():
            if isinstance(stage, (FromCheckpoint, CooldownStage)) and stage.from_.stage == name:
                wanted.add(branch(stage.from_, self.graph.trajectories, ("stages", other, "from")).step)
        return checkpoint.model_copy(update={"milestones": sorted(wanted)})

    def _drawn_until(self, node: Node, step: int) -> dict[tuple[str, int], int]:
        """Samples drawn from each mixture on the way to a step of a segment, by the counters that the segments state."""
        drawn: dict[tuple[str, int], int] = {}
        current: Node | None = node
        while current is not None:
            segment = current.part
            assert isinstance(segment, Segment) and current.end_step is not None
            counter = (current.inputs["mixture"].fingerprint, segment.sequence_length)
            drawn.setdefault(counter, segment.sample_at(step))
            before = current.inputs.get("parent")
            current = self.graph.nodes[before.node] if before and before.node else None
            step = before.step or 0 if before else 0
        return drawn

    def _tokenizer_of(self, mixture: Input, name: str, trajectory: Trajectory) -> Input:
        corpus = self.graph.nodes[mixture.name].inputs["source:0"].name
        tokenizer = self.graph.nodes[corpus].inputs["tokenizer"]
        part = self.graph.nodes[tokenizer.name].part
        assert isinstance(part, TokenizerPart)
        if part.vocab_size > trajectory.model.vocab_size:
            message = f"the model has {trajectory.model.vocab_size:,} embeddings, tokenizer '{tokenizer.name}' has {part.vocab_size:,} ids"
            self.problems.append(Problem(("stages", name), message, f"set the model's vocab_size to {part.vocab_size}."))
        return tokenizer

    def _add_evaluate(self, name: str, stage: EvaluateStage) -> None:
        checkpoint, trajectory = self._checkpoint(stage.from_, ("stages", name, "from"))
        sources = [self._part(source) for source in stage.sources]
        tokenizer = self._tokenizer_behind(checkpoint)
        for index, source in enumerate(sources):
            self._same_tokenizer(
                ("stages", name, "sources", index), source.name, self.graph.nodes[source.name].inputs["tokenizer"], tokenizer
            )
        inputs = {"checkpoint": checkpoint, "tokenizer": tokenizer}
        inputs |= {f"source:{index}": source for index, source in enumerate(sources)}
        memorisation = stage.memorisation
        if memorisation:
            inputs["probes"] = self._part(memorisation.probes)
        part = EvaluatePart(
            model=trajectory.model,
            sequence_length=trajectory.sequence_length,
            samples=stage.samples,
            prefix=memorisation.prefix if memorisation else 0,
            suffix=memorisation.suffix if memorisation else 0,
            source_names=[source.name for source in sources],
        )
        self._node(name, name, part, inputs)

    def _add_export(self, name: str, stage: ExportStage) -> None:
        checkpoint, trajectory = self._checkpoint(stage.from_, ("stages", name, "from"))
        part = ExportPart(
            model=trajectory.model,
            sequence_length=trajectory.sequence_length,
            max_shard_size=int(stage.max_shard_size),
            tolerance=stage.tolerance,
        )
        self._node(name, name, part, {"checkpoint": checkpoint, "tokenizer": self._tokenizer_behind(checkpoint)})

    def _same_tokenizer(self, path: FieldPath, what: str, its: Input, models: Input) -> None:
        """Token ids mean nothing to a model that was trained with another tokenizer."""
        if its.fingerprint != models.fingerprint:
            message = f"'{what}' is tokenised by '{its.name}', the model was trained with '{models.name}'"
            self.problems.append(Problem(path, message, f"use a corpus made with '{models.name}'."))

    def _tokenizer_behind(self, checkpoint: Input) -> Input:
        return self.graph.nodes[checkpoint.name].inputs["tokenizer"]
