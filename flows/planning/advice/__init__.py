"""Advice on a recipe that can run but may not be what its author wants.

Each check is a generator that yields `Advice` with one code of `specs.advice`. Silenced advice is left out,
and a note names silences without effect.

Invariant: advice refuses nothing and changes nothing; it depends on the plan alone.
"""

from typing import Any, NamedTuple

from flows.planning.advice import resources, training
from flows.planning.advice.given import Advice, Context
from flows.planning.estimate import Estimates
from flows.planning.graph import Graph
from flows.planning.source_usage import SourceUsage
from specs.pipeline import Pipeline

CHECKS = (
    training.sft_optimizer,
    training.decay_before_sft,
    training.learning_rate_jump,
    training.slow_warmup,
    training.never_reached,
    training.repetition,
    training.goldfish_off,
    training.rope_theta,
    training.tokens_per_batch,
    training.not_deterministic,
    resources.checkpoint_interval,
    resources.gpu_memory,
    resources.sampling_memory,
    resources.slow_inference,
    resources.slow_corpus,
    resources.cluster_size,
)


class Given(NamedTuple):
    """The advice of a plan. The default lists are never changed."""

    given: list[Advice] = []  # noqa: RUF012  # to show
    silenced: list[Advice] = []  # noqa: RUF012  # left out by the recipe
    notes: list[str] = []  # noqa: RUF012  # on silences without effect

    def to_json(self) -> dict[str, Any]:
        return {
            "advice": [advice.to_json() for advice in self.given],
            "silenced": [advice.to_json() for advice in self.silenced],
        }


def advise(graph: Graph, pipeline: Pipeline, usages: list[SourceUsage], estimates: Estimates) -> Given:
    """All advice on a plan, in the order of the stages."""
    context = Context(graph, pipeline, usages, estimates)
    all_advice = [advice for check in CHECKS for advice in check(context)]
    order = list(pipeline.stages)
    all_advice.sort(key=lambda advice: order.index(advice.stage))
    silent = {(name, code) for name, stage in pipeline.stages.items() for code in stage.silence}
    silent |= {("", code) for code in pipeline.silence}
    can_be_silenced = {pair for advice in all_advice for pair in advice.silenced_by}
    given = [advice for advice in all_advice if not silent & advice.silenced_by]
    silenced = [advice for advice in all_advice if silent & advice.silenced_by]
    notes = [
        f"{name}{': ' if name else ''}silence: [{code}] has no effect, there is nothing to silence"
        for name, code in sorted(silent - can_be_silenced, key=lambda pair: (not pair[0], pair))
    ]
    return Given(given, silenced, notes)
