"""The part of `evaluate_reward`, after the part of the model that it asks."""

from __future__ import annotations

from typing import cast

from flows.planning.parts.builder import Builder
from flows.planning.parts.preferences import reward_inputs
from specs.errors import FieldPath, did_you_mean
from specs.stages.evaluate_reward import EvaluateRewardPart, EvaluateRewardStage


def add_evaluate_reward(builder: Builder, name: str) -> None:
    """Adds the parts of the stage, of which the evaluation is the last."""
    stage = cast(EvaluateRewardStage, builder.pipeline.stages[name])
    at: FieldPath = ("stages", name)
    inputs = reward_inputs(builder, name, stage.reward, (*at, "reward"))
    read = sorted((builder.part(source) for source in stage.pairs), key=lambda one: one.fingerprint)
    inputs |= {f"conversations:{index}": one for index, one in enumerate(read)}
    part = EvaluateRewardPart(
        reward=stage.reward,
        split=stage.split,
        limit=stage.limit,
        seed=stage.seed,
        source_names=[one.name for one in read],
        pairs_per_unit=stage.pairs_per_unit,
    )
    builder.node(name, name, part, inputs)
    known = list(part.metrics())
    stated = [((*at, "gates", index, "metric"), gate.metric) for index, gate in enumerate(stage.gates)]
    for path, metric in [*stated, *(((*at, "reference", metric), metric) for metric in stage.reference)]:
        if metric not in known:
            message = f"'{name}' will not have a metric '{metric}'"
            builder.problem(path, message, did_you_mean(metric, known))
