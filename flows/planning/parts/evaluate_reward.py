"""The part of `evaluate_reward`, after the part of the model that it asks."""

from flows.planning.parts.builder import Builder, numbered, shared
from flows.planning.parts.preferences import reward_inputs
from specs.stages.evaluate_reward import EvaluateRewardPart, EvaluateRewardStage


def add_evaluate_reward(builder: Builder, name: str, stage: EvaluateRewardStage) -> None:
    inputs = reward_inputs(builder, name, stage.reward, ("stages", name, "reward"))
    pairs = builder.parts(stage.pairs)
    names = [source.name for source in pairs]
    part = EvaluateRewardPart(**shared(stage, EvaluateRewardPart), source_names=names)
    builder.node(name, name, part, inputs | numbered("conversations", pairs))
    known = list(part.metrics())
    for path, metric in builder.stated_metrics(name):
        if metric not in known:
            builder.unknown_metric(path, name, metric, known)
