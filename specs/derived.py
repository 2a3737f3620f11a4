"""The trajectories of the kinds that make a checkpoint of others without training: merges, rewrites and
selections."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from specs.errors import SpecError
from specs.schedule import Schedule
from specs.stages.merge import MergeStage
from specs.stages.rewrite import RewriteStage
from specs.stages.select import SelectStage
from specs.trajectory import (
    Best,
    Point,
    SegmentPlan,
    Trajectories,
    Trajectory,
    candidates,
    different_fields,
    phase_of,
    point_of,
)

if TYPE_CHECKING:
    from specs.pipeline import Pipeline


def _merged(pipeline: Pipeline, name: str, trajectories: Trajectories, best: Best) -> Trajectory | None:
    stage = cast(MergeStage, pipeline.stages[name])
    if not all(phase_of(ref, trajectories) in trajectories for ref in stage.parents):
        return None
    paths = [
        ("stages", name, *(("checkpoints", index) if index < len(stage.checkpoints) else ("base",)))
        for index in range(len(stage.parents))
    ]
    named = zip(stage.parents, paths, strict=True)
    branches = [point_of(ref, trajectories, path, best) for ref, path in named]
    parents = [trajectories[start.phase] for start in branches]
    first = next((parent for parent in parents if parent.origin != "import"), parents[0])
    for ref, other, path in zip(stage.parents, parents, paths, strict=True):
        if fields := different_fields(other.model, first.model):
            message = f"'{ref}' and '{stage.parents[parents.index(first)]}' differ in {fields}"
            raise SpecError.of(path, message, "merge checkpoints of the same dimensions.")
    return replace(_alone(name, first, branches[parents.index(first)]), parent=None, origin="merge")


def _alone(name: str, trajectory: Trajectory, start: Point) -> Trajectory:
    """A checkpoint of a trajectory as a trajectory of a single step, of the stage `name`."""
    batch = trajectory.segments[start.segment].batch
    still = SegmentPlan("", batch, 0, batch, 0, Schedule())
    held = trajectory.settings.optimizer.model_copy(update={"lr": trajectory.lr_at(start.step)})
    settings = trajectory.settings.model_copy(update={"optimizer": held})
    alone = replace(trajectory, segments=(still,), planned=(still,), schedule=still.schedule)
    return replace(alone, settings=settings, stage=name, seed=None, carry=(), leftover_tokens=0)


def _rewritten(pipeline: Pipeline, name: str, trajectories: Trajectories, best: Best) -> Trajectory | None:
    stage, at = cast(RewriteStage, pipeline.stages[name]), ("stages", name)
    if phase_of(stage.from_, trajectories) not in trajectories:
        return None
    start = point_of(stage.from_, trajectories, (*at, "from"), best)
    parent = trajectories[start.phase]
    if stage.layer_pairs is not None:
        if parent.model.method is not None:
            message = f"the layers of '{stage.from_}' have another order already: {parent.model.method[0]}"
            fix = "name a checkpoint whose layers run one after the other."
            raise SpecError.of((*at, "from"), message, fix)
        if obstacle := stage.layer_pairs.obstacle(parent.model.n_layers):
            raise SpecError.of((*at, "layer_pairs"), obstacle, "set a range inside the model.")
    model = parent.model.model_copy(update=stage.changes)
    if model == parent.model:
        (field,) = stage.changes
        message = f"'{stage.from_}' is computed in that way already"
        raise SpecError.of((*at, field), message, "set another, or leave out the stage.")
    if obstacle := model.attention_obstacle:
        message, _, _ = obstacle.partition(";")
        fix = "name a checkpoint whose layers read their own keys alone."
        raise SpecError.of((*at, "attention"), f"'{stage.from_}': {message}", fix)
    return replace(_alone(name, parent, start), model=model, parent=start, origin="rewrite")


def _selected(pipeline: Pipeline, name: str, trajectories: Trajectories, best: Best) -> Trajectory | None:
    """The trajectory of the candidate that is currently chosen. All candidates have the same dimensions, so
    later stages can be planned before the choice; candidates may be computed in different ways."""
    stage, among = cast(SelectStage, pipeline.stages[name]), candidates(pipeline, name)
    known = all(ref.stage in pipeline.stages for ref in stage.evaluations)
    if not known or not all(phase_of(ref, trajectories) in trajectories for _, ref in among):
        return None
    starts = [point_of(ref, trajectories, path, best) for path, ref in among]
    models = [trajectories[start.phase].model.without_method for start in starts]
    for (path, ref), model in zip(among, models, strict=True):
        if fields := different_fields(model, models[0]):
            message = f"'{ref}' and '{among[0][1]}' differ in {fields}"
            raise SpecError.of(path, message, "choose among checkpoints of the same dimensions.")
    chosen = starts[best.get(name, 0)]
    return replace(trajectories[chosen.phase], stage=name, stands_for=chosen)


DERIVED = {"select": _selected, "merge": _merged, "rewrite": _rewritten}
"""The trajectories of the kinds that make a checkpoint of others; None as long as one of these is missing."""
