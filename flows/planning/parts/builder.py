"""The builder that resolves stages of every kind: the graph so far, inputs by reference, and a list of
problems."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, cast

import fsspec

from flows.planning.graph import FOLDER, TOKENIZER, Graph, Input, Node
from flows.planning.unavailable import Unavailable, is_local, provisional
from infra.store import Artifact, Store
from infra.store.hugging_face import FOLDER_FILES, TOKENIZER_FILES, HubModel
from infra.store.inputs import Listing, SourceError, list_source, locked_digest
from specs.base import Spec
from specs.dependencies import MODELS, uses
from specs.errors import FieldPath, Problem, did_you_mean
from specs.hugging_face import not_representable
from specs.locations import RULE
from specs.model import ModelSpec
from specs.pipeline import Pipeline
from specs.sources import SourceSpec, resolve_url
from specs.stages import STAGES
from specs.stages.base import Part
from specs.stages.export import ExportPart
from specs.stages.gates import Gated
from specs.stages.hugging_face import ImportModelPart, ModelFolderPart
from specs.stages.rewrite import RewriteStage
from specs.stages.tokenizer import TokenizerPart, TokenizerStage
from specs.trajectory import Point, Trajectory, candidates, phase_of, point_of
from specs.units import HUGGING_FACE, Reference

FIX = (
    "name a folder, or a model that is in the local Hugging Face cache, with config.json, safetensors and"
    " tokenizer.json."
)


class Builder:
    """A builder that collects nodes in `graph` and mistakes in `problems`."""

    def __init__(
        self,
        pipeline: Pipeline,
        store: Store,
        on_read: Callable[[str, Listing], None],
        ask_network: bool = True,
    ) -> None:
        self.pipeline = pipeline
        self.store = store
        self.on_read = on_read
        self.ask_network = ask_network  # for declared inputs
        self.graph = Graph()
        self.suite_metrics: dict[str, list[str]] = {}  # by part of a suite whose tasks are known
        self.problems: list[Problem] = []
        self._listings: dict[tuple[Any, ...], Listing] = {}  # by url, globs, and whether the format is arrow

    def node(
        self,
        name: str,
        stage_name: str,
        part: Part,
        inputs: dict[str, Input],
        *,
        kind: str = "",
        **numbers: Any,
    ) -> Node:
        """Adds a part, unless there is one with this name. `kind` is that of the part if it differs from the
        stage's; the version is that of the kind."""
        if (existing := self.graph.nodes.get(name)) is not None:
            return existing
        stage = self.pipeline.stages[stage_name]
        kind = kind or stage.kind
        version = STAGES[kind].VERSION if kind in STAGES else part.VERSION
        node = Node(name, stage_name, kind, version, part, inputs, self.pipeline.launch_of(stage), **numbers)
        self.graph.nodes[name] = node
        return node

    @cached_property
    def starts(self) -> list[tuple[Point, Reference]]:
        """Every checkpoint that some stage reads, once the trajectories are known."""
        trajectories = self.graph.trajectories
        named = [
            use
            for name, stage in self.pipeline.stages.items()
            for use in uses(name, stage)
            if set(use.results) & set(MODELS)
        ]
        return [
            (point_of(use.reference, trajectories, use.path, self.graph.best), use.reference)
            for use in named
            if phase_of(use.reference, trajectories) in trajectories
        ]

    def problem(self, path: FieldPath, message: str, fix: str = "") -> None:
        new = Problem(path, message, fix)
        if new not in self.problems:
            self.problems.append(new)

    def stated_metrics(self, name: str) -> Iterator[tuple[FieldPath, str]]:
        """The metrics of a stage that its gates and published scores name, with their paths."""
        stage = cast(Gated, self.pipeline.stages[name])
        for index, gate in enumerate(stage.gates):
            yield ("stages", name, "gates", index, "metric"), gate.metric
        for metric in stage.published_scores():
            yield ("stages", name, "reference", metric), metric

    def unknown_metric(self, path: FieldPath, name: str, metric: str, known: Iterable[str]) -> None:
        self.problem(path, f"'{name}' will not have a metric '{metric}'", did_you_mean(metric, known))

    def unreadable(self, path: FieldPath, error: SourceError, fix: str, url: str) -> None:
        """Adds the problem of files that cannot be read. Where they are local, the fix says where a relative
        path begins."""
        self.problem(path, str(error), f"{fix.removesuffix('.')}; {RULE}." if os.path.isabs(url) else fix)

    def documents(self, name: str) -> Input:
        """A source as an input, by the digest of its content."""
        if name not in self.graph.digests:
            source = self.pipeline.sources[name]
            fix = "correct the url or the globs."
            self._digest(name, name, source, ("sources", name), fix, source.declared is not None)
        return Input("external", self.graph.digests[name], name)

    def folder(self, key: str, url: str, include: list[str], path: FieldPath, fix: str) -> Input:
        """Files of a folder outside the store as an input, by the digest of their content. `key` names the
        listing."""
        try:
            source = SourceSpec(url=url, format="text", include=include)
        except ValueError as error:
            self.problem(path, str(error), fix)
            return Input("external", "unknown", url)
        return self.outside(key, source, path, fix)

    def outside(self, key: str, source: SourceSpec, path: FieldPath, fix: str) -> Input:
        """Files outside the store that are not a source of the recipe, as an input, by the digest of their
        content."""
        may_be_absent = source.declared is not None or self.pipeline.assumed_inputs.covers(source.url)
        self._digest(key, source.url, source, path, fix, may_be_absent)
        return Input("external", self.graph.digests[key], source.url)

    def _digest(
        self, key: str, name: str, source: SourceSpec, path: FieldPath, fix: str, may_be_absent: bool
    ) -> None:
        if may_be_absent and not self.ask_network and not is_local(source.url):
            self.unavailable(key, name, source, "a plan does not read remote urls", path)
            return
        try:
            listing = self.listing(source)
            digest = locked_digest(self.store, listing)
            if digest is None:
                self.on_read(name, listing)
                digest = listing.digest()
            self.graph.listings[key] = listing
        except SourceError as error:
            if may_be_absent:
                self.unavailable(key, name, source, str(error), path)
                return
            self.unreadable(path, error, fix, source.url)
            digest = "unknown"
        self.graph.digests[key] = digest

    def listing(self, source: SourceSpec) -> Listing:
        """The files of a source, which are listed and read once for all sources with its url and globs.
        SourceError where they cannot be listed."""
        chosen = (source.url, source.format == "arrow", tuple(source.include), tuple(source.exclude))
        if chosen not in self._listings:
            self._listings[chosen] = list_source(source)
        return self._listings[chosen]

    def unavailable(self, key: str, name: str, source: SourceSpec, reason: str, path: FieldPath) -> None:
        """Records that a declared input is unavailable. `name` is that of the `Input`s that stand for it."""
        self.graph.unavailable[name] = Unavailable(source.url, reason, path, source.declared)
        self.graph.digests[key] = provisional(source)

    def part(self, ref: Reference) -> Input:
        """An artifact that is not a checkpoint: the named part, or the stage's last one."""
        return reads(self.graph.part(ref))

    def parts(self, refs: Iterable[Reference]) -> list[Input]:
        """Several of these, in the order of their fingerprints."""
        return sorted(map(self.part, refs), key=lambda input_: input_.fingerprint)

    def shortest(self, conversations: Iterable[Input], split: str, what: str = "shortest") -> int:
        """The tokens of the shortest conversation of a split, or of the shortest prompt (`shortest_prompt`);
        0 until all parts are stored."""
        lengths = []
        for input_ in conversations:
            artifact = Artifact(self.store, self.graph.nodes[input_.name].path)
            metrics = artifact.manifest.metrics if artifact.complete else {}
            lengths.append(metrics.get(split, {}).get(what, 0))
        return min(lengths)

    def checkpoint(self, ref: Reference, path: FieldPath) -> tuple[Input, Trajectory]:
        """A checkpoint, and its trajectory. For a selection, the chosen checkpoint, or the selection itself
        until it has chosen; for a rewrite, the checkpoint that it reads, with the trajectory of the
        rewrite."""
        start = point_of(ref, self.graph.trajectories, path, self.graph.best)
        stage = self.pipeline.stages.get(ref.stage)
        if stage is not None and stage.kind == "select":
            if ref.stage not in self.graph.best:
                return reads(self.graph.nodes[ref.stage], 1), self.graph.trajectories[start.phase]
            path, ref = candidates(self.pipeline, ref.stage)[self.graph.best[ref.stage]]
            return self.checkpoint(ref, path)
        if stage is not None and stage.kind == "rewrite":
            checkpoint, _ = self.checkpoint(cast(RewriteStage, stage).from_, ("stages", ref.stage, "from"))
            return checkpoint, self.graph.trajectories[ref.stage]
        if ref.hugging_face is not None:
            node = self.imported_model(ref, path)
        else:
            node = self.graph.segments(start.phase)[start.segment]
        return reads(node, start.step), self.graph.trajectories[start.phase]

    def tokenizer_of(self, input_: Input) -> Input:
        """The tokenizer of a part, found through its inputs."""
        node = self.graph.nodes[input_.node or ""]
        if node.imported:
            name = node.name.replace("/import", "/tokenizer")
            return reads(
                self.model_tokenizer(Reference(node.phase), name, node.stage, ("stages", node.stage))
            )
        if "tokenizer" in node.inputs:
            return node.inputs["tokenizer"]
        return self.tokenizer_of(next(iter(node.inputs.values())))

    def exportable(self, path: FieldPath, trajectory: Trajectory) -> None:
        """Checks that the model can become a Hugging Face folder, which sampling, tasks and export need."""
        if (obstacle := not_representable(trajectory.model)) is not None:
            model = trajectory.model
            if model.attention is not None:
                fix = (
                    "train it on with full attention: a rewrite with attention: full, and a stage from there."
                )
            elif model.activation != "xielu":
                fix = "name a model with activation: xielu."
            else:
                fix = f"name a model without {_own_part(model)}."
            self.problem(path, f"the model cannot become a Hugging Face folder: {obstacle}", fix)

    def sampled(self, path: FieldPath, model: Node | None, engine: str) -> None:
        """Checks that the engine can sample from the model: vLLM runs no code that comes with a model."""
        if engine != "vllm" or model is None or model.kind != "export":
            return
        if not (exported := cast(ExportPart, model.part).model).stock:
            message = f"vLLM cannot compute model.{_own_part(exported)}"
            self.problem(path, message, "use engine: transformers.")

    def same_tokenizer(self, path: FieldPath, input_: Input, models: Input) -> None:
        """Checks that data, or a checkpoint, have a model's tokenizer: token ids mean nothing to a model that
        was trained with another one. `models` is the model's tokenizer, or an imported checkpoint.

        Two tokenizers are the same if their tokenizer.json files are, however they were made."""
        its = self.tokenizer_of(input_)
        if its.fingerprint == models.fingerprint:
            return
        own, wanted = self.tokenizer_digest(its), self.tokenizer_digest(models)
        if own is not None and own == wanted:
            return
        shown = f" (tokenizer.json {own[:12] if own else 'not made yet'} and {wanted[:12]})" if wanted else ""
        reference = origin(self.graph.nodes[models.name])
        trained = f"'{models.name}'" if reference is None else f"that of '{reference}'"
        message = f"'{input_.name}' is tokenised by '{its.name}', the model was trained with {trained}{shown}"
        maker = (
            f"'{models.name}'" if reference is None else f"a tokenizer stage that states from: {reference}"
        )
        self.problem(path, message, f"use data made with {maker}.")

    def model_folder(self, key: str, model: HubModel, include: list[str], path: FieldPath) -> Input:
        if key in self.graph.unavailable:
            return Input("external", self.graph.digests[key], key)
        folder = self.folder(key, model.url, include, path, FIX)
        return Input(folder.kind, folder.fingerprint, key)

    def imported_model(self, ref: Reference, path: FieldPath) -> Node:
        """The weights of a model as a checkpoint, in a part of the stage that `path` leads to."""
        stage, model = str(path[1]), self.graph.models[str(ref)]
        assert model.model is not None, "checked with the references"
        field = path[-1] + 1 if isinstance(path[-1], int) else path[-1]
        name = f"{stage}/import" if field == "from" else f"{stage}/import-{field}"
        if (existing := self.graph.nodes.get(name)) is not None:
            return existing
        part = ImportModelPart(**shared(model, ImportModelPart))
        inputs = {"folder": self.model_folder(str(ref), model, list(model.files), path)}
        return self.node(name, stage, part, inputs, kind="import_model", end_step=1, phase=str(ref))

    def other_model(self, ref: Reference) -> HubModel | None:
        """The model of a reference, if it is of another architecture, which is not trained; None for any
        other reference."""
        model = self.graph.models.get(str(ref))
        return model if model is not None and model.model is None else None

    def kept_folder(self, ref: Reference, stage: str, path: FieldPath, part_name: str = "model") -> Node:
        """The folder of a Hugging Face model as it is, which is sampled, asked or evaluated."""
        model, name = self.graph.models[str(ref)], f"{stage}/{part_name}"
        if (existing := self.graph.nodes.get(name)) is not None:
            return existing
        files = [*model.files, *FOLDER_FILES]
        key = str(ref) if str(ref) in self.graph.unavailable else f"{ref}{FOLDER}"
        part = ModelFolderPart(**shared(model, ModelFolderPart) | {"files": files})
        inputs = {"folder": self.model_folder(key, model, files, path)}
        return self.node(name, stage, part, inputs, kind="model_folder")

    def model_tokenizer(
        self, ref: Reference, name: str, stage: str, path: FieldPath, vocab_size: int | None = None
    ) -> Node:
        """The tokenizer of a model, as a tokenizer stage that states `from:` makes it."""
        if (existing := self.graph.nodes.get(name)) is not None:
            return existing
        model = self.graph.models[str(ref)]
        folder = self.model_folder(f"{ref}{TOKENIZER}", model, TOKENIZER_FILES, path)
        fields = TokenizerStage.model_fields
        assert model.model is not None, "checked with the references"
        part = TokenizerPart(
            path=model.url,
            vocab_size=vocab_size or model.model.vocab_size,
            bytes_per_source=fields["bytes_per_source"].default,
        )
        return self.node(name, stage, part, {"folder": folder}, kind="tokenizer")

    def tokenizer_digest(self, tokenizer: Input) -> str | None:
        """SHA-256 of the tokenizer.json of a tokenizer part, or of an imported model; None for a tokenizer
        that is not trained yet."""
        node = self.graph.nodes[tokenizer.node or ""]
        if node.imported:
            return self.graph.models[node.phase].tokenizer_digest
        part, folder = cast(TokenizerPart, node.part), node.inputs.get("folder")
        if folder is not None and folder.name in self.graph.unavailable:
            return folder.fingerprint
        if part.path is not None:
            try:
                fs, root = fsspec.core.url_to_fs(resolve_url(part.path))
                return hashlib.sha256(fs.cat_file(f"{root.rstrip('/')}/tokenizer.json")).hexdigest()
            except (OSError, ValueError):  # reported at the stage that names the folder
                return None
        artifact = Artifact(self.store, node.path)
        record = artifact.manifest.files.get("tokenizer.json") if artifact.complete else None
        return record.sha256 if record else None


def origin(node: Node) -> str | None:
    """The `hf:` reference that a part of a Hugging Face model was made from; None for any other part."""
    folder = node.inputs.get("folder")
    if folder is not None and folder.name.startswith(HUGGING_FACE):
        return folder.name.removesuffix(TOKENIZER).removesuffix(FOLDER)
    return None


def shared(stage: Spec | HubModel, part: type[Part]) -> dict[str, Any]:
    """What a stage, some settings or a model state under the names of a part's fields."""
    return {name: getattr(stage, name) for name in part.model_fields if hasattr(stage, name)}


def numbered(role: str, inputs: Iterable[Input]) -> dict[str, Input]:
    """Inputs of one role, `<role>:<number>`."""
    return {f"{role}:{number}": input_ for number, input_ in enumerate(inputs)}


def reads(node: Node, step: int | None = None) -> Input:
    """A part as the input of another part; `step` is that of a checkpoint."""
    return Input(node.kind, node.fingerprint, node.name, node.name, step)


def _own_part(model: ModelSpec) -> str:
    """The name of the field of a model that the Apertus class of transformers does not know."""
    return model.method[0] if model.method is not None else "mamba"
