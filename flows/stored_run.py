"""The Python API: what a run has stored, for notebooks and scripts.

    from flows import open_run

    run = open_run("specs/recipes/mini.yaml")
    run.metrics("pretrain", "cooldown").to_pandas().plot(x="step", y="loss")
    run.tensors("pretrain", step=100)["layers.0.attention.wq.weight"].norm()
    run.samples("sft", step=3)[0]["documents"]

Invariant: it reads the store through a plan, as the command line does, and changes nothing. torch is imported
when a tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.inspection.common import Options
from flows.inspection.inspectors import inspector_of
from flows.planning.plan import Plan, make
from flows.stored_part import PlannedPart, finished, planned_parts, training_rows
from infra.store import Artifact, Checkpoint, Store
from specs.errors import SpecError
from specs.recipe import load

if TYPE_CHECKING:
    import pyarrow
    import torch


def open_run(recipe: str | Path, *overrides: str, store: str | None = None) -> StoredRun:
    """What a recipe has stored.

    Args:
        recipe: its YAML file.
        overrides: fields to change, as with --set: "stages.sft.optimizer.lr=2e-6".
        store: folder or fsspec URL; that of the recipe by default.

    Raises:
        SpecError: the recipe is not valid.
    """
    pipeline = load(recipe, overrides)
    return StoredRun(make(pipeline, Store.open(store or pipeline.store)))


class StoredRun:
    """The results of the parts of a plan, which have the names that `apertus status` prints."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __repr__(self) -> str:
        done = sum(step.action == "reuse" for step in self.plan.steps.values())
        return f"<run of {self.plan.pipeline.name}: {done} of {len(self.plan.steps)} parts are finished>"

    @property
    def parts(self) -> dict[str, PlannedPart]:
        """The parts by name, with their state, inputs, settings, metrics, facts and history."""
        return planned_parts(self.plan)

    def artifact(self, name: str) -> Artifact:
        """The finished artifact of a part. SpecError when there is none, or the stage has several parts."""
        nodes = self.plan.named(name, "artifact")
        if len(nodes) > 1:
            fix = f"name one: {', '.join(node.name for node in nodes)}."
            raise SpecError.of((), f"'{name}' has {len(nodes)} parts", fix, "artifact")
        return finished(self.plan, nodes[0], "artifact")

    def results(self, name: str) -> dict[str, Any]:
        """The metrics of a part: perplexities, rewards, counts."""
        return self.artifact(name).manifest.metrics

    def metrics(self, *stages: str) -> pyarrow.Table:
        """The rows of training of stages, all by default: run, stage, part, attempt, step, and a column for
        each metric. Of an unfinished part, those up to its last checkpoint."""
        import pyarrow

        for stage in stages:
            self.plan.named(stage, "metrics")
        return pyarrow.Table.from_pylist(training_rows(self.plan, stages or self.plan.pipeline.stages))

    def tensors(self, stage: str, step: int | None = None) -> Mapping[str, torch.Tensor]:
        """The tensors of a checkpoint of a stage by name, each read when it is asked for: of its last
        checkpoint by default. SpecError, which lists the steps, when there is none at `step`."""
        nodes = [node for node in self.plan.named(stage, "tensors") if node.end_step is not None]
        kept = {at: node for node in nodes for at in node.kept_steps(self.plan.store)}
        if (at := max(kept, default=-1) if step is None else step) not in kept:
            steps = ", ".join(map(str, sorted(kept))) or "none"
            raise SpecError.of((), f"'{stage}' has no such checkpoint", f"the steps are {steps}.", "tensors")
        return _Tensors(kept[at].artifact(self.plan.store).checkpoint(at))

    def samples(self, stage: str, step: int | None = None, limit: int = 2) -> list[dict[str, Any]]:
        """The first samples of a step of training (its first by default), as the model sees them."""
        return list(self.inspect(stage, step=step, limit=limit)["samples"])

    def inspect(self, name: str, **options: Any) -> dict[str, Any]:
        """What `apertus inspect NAME --json` prints; `options` are those of the command, such as limit=3."""
        chosen = Options(**options)
        inspector, node = inspector_of(self.plan, name, chosen)
        return dict(inspector.collect(self.plan, node, chosen))


class _Tensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint, read one by one."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from apertus_model.trainer.checkpoint_reader import CheckpointReader

        self._checkpoint = checkpoint
        self._index: Mapping[str, Any] = CheckpointReader(checkpoint).read_metadata().state_dict_metadata

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch

        from apertus_model.trainer.checkpoint import load_tensors

        metadata = self._index[name]
        state = {name: torch.empty(metadata.size, dtype=metadata.properties.dtype)}
        load_tensors(state, self._checkpoint)
        return state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)
