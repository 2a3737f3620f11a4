"""The `evaluate_reward` stage: how far a reward agrees with labelled pairs, and what else it prefers."""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

from specs.base import execution, identity, option, reference
from specs.rewards import RewardSpec
from specs.stages.base import DifferentReferences, Part
from specs.stages.gates import Measuring

MEASURES = {
    "accuracy": "accuracy: the chosen completion has the higher reward, equal ones counting half",
    "ties": "pairs with equal rewards",
    "accuracy/longer": "accuracy where the chosen completion is the longer one",
    "accuracy/shorter": "accuracy where the chosen completion is the shorter one",
    "length_bias": "how much more often than the labels the reward prefers the longer completion",
}
OF_COMPARISON = {
    "accuracy/compared": "accuracy of the comparison, in the mean of both orders",
    "order_bias": "probability of the completion that is shown first, above 1/2",
    "order_consistency": "comparisons that both orders decide for the same completion",
}
"""The measures of a judge that compares completions two by two."""
OF_SOURCE = "accuracy/source/"
ENDS = ("", "/low", "/high")


class EvaluateRewardStage(Measuring):
    """Compares a reward with the labels of pairs.

    Metrics are `pairs`; `accuracy` (the share of pairs whose chosen completion has the higher reward, ties
    counting half), also as `accuracy/longer` and `accuracy/shorter` for the pairs whose chosen completion has
    more or fewer characters, and `accuracy/source/<conversations>`; `ties`; `length_bias` (the share of pairs
    in which the reward prefers the longer completion, less the share in which the labels do); for a judge
    with `pairwise` also `accuracy/compared`, `order_bias` (mean probability of the completion that is shown
    first, less 1/2) and `order_consistency` (the share of pairs of which both orders prefer the same
    completion). Each of them has `/low` and `/high`, a 95% interval of the bootstrap over pairs. For a judge
    there are also `outside` and `outside_max`: the mean and the largest probability of everything that is not
    an answer.
    """

    VERSION: ClassVar[int] = 1
    kind: Literal["evaluate_reward"] = identity()
    reward: RewardSpec = reference()
    pairs: DifferentReferences = reference(
        min_length=1,
        to="conversations",
        description="parts of `conversations` stages whose rows have `chosen` and `rejected`. A pair is"
        " dropped, and counted, if its completions are equal or too long for the reward's model",
    )
    split: Literal["train", "validation"] = reference(
        "validation", description="split of the conversations; a reward model has seen those of train"
    )
    limit: int | None = reference(
        None, ge=2, description="maximum number of pairs of each part, chosen by a hash"
    )
    seed: int = reference(0, ge=0, description="seed of the choice and of the bootstrap")
    pairs_per_unit: int = execution(64, ge=1, description="pairs per restartable unit of work")


class EvaluateRewardPart(Part):
    """The resolved evaluation. Inputs: `conversations:<i>`; `reward_model`, or `judge` and `constitution`, as
    for `RewardsPart`."""

    WORKERS: ClassVar[int] = 1
    HELD_BY: ClassVar[str] = "reward"
    reward: RewardSpec = identity()
    split: Literal["train", "validation"] = identity()
    limit: int | None = option(None)
    seed: int = identity()
    source_names: list[str] = execution(description="names of the conversations, for the metrics")
    pairs_per_unit: int = execution(64)

    def metrics(self) -> Iterator[str]:
        """The names of all metrics. The measurement leaves out those about which no pair says anything."""
        measures: Iterable[str] = [*MEASURES, *(f"{OF_SOURCE}{name}" for name in self.source_names)]
        judge = self.reward.judge
        if judge is not None and judge.pairwise is not None:
            measures = [*measures, *OF_COMPARISON]
        yield "pairs"
        yield from (f"{measure}{end}" for measure in measures for end in ENDS)
        if judge is not None:
            yield from ("outside", "outside_max")
