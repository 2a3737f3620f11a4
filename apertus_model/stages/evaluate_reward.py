"""The `evaluate_reward` stage: compares a reward with the labels of pairs.

Artifact: `pairs-00000.jsonl`, ..., a line per conversation: `{"id", "source", "chosen", "rejected",
"characters"}`, the rewards of both completions and their lengths, with the answers of a judge as in
`rewards`; or `{"id", "dropped"}`, with the reason. For a judge, also its `constitution.txt`. The metrics are
listed in `specs.stages.evaluate_reward`.

Invariants: a reward sees the completions of one pair at a time, so no value depends on the division into
units. Every figure (agreement with the labels, and biases that the labels do not explain) is a mean over
pairs, with the interval of the bootstrap over these pairs; a figure to which no pair contributes is left out.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apertus_model.data.conversations.rows import ConversationRange, ConversationRows
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.order.permutation import KeyedPermutation
from apertus_model.data.rows import Row, read_units, write_rows
from apertus_model.evaluation.paired import mean_with_interval
from apertus_model.progress import Progress
from apertus_model.rewards import Reward, RewardError, Scored
from apertus_model.rewards.base import TooLongError
from apertus_model.rewards.registry import open_of_part, score_prompt
from apertus_model.stages.rewards import answers_of, put_constitution
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import prepare_process
from apertus_model.work import run_units
from infra.store import Attempt
from specs.errors import counts_in_words
from specs.stages.evaluate_reward import OF_SOURCE, EvaluateRewardPart

TOLD = ("accuracy", "ties", "length_bias", "order_bias", "outside")


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Compares the reward with the labels. RewardError when the reward cannot be opened, raises, is not a
    finite number or is constant, or when no pair is left."""
    part = EvaluateRewardPart.model_validate(attempt.job.spec)
    put_constitution(part.reward, attempt)
    units = run_units(Units(attempt), attempt, stop, progress, processes=part.WORKERS)
    summary = AgreementSummary(part.source_names)
    facts = write_rows(attempt, "pairs", map(summary.add, read_units(units)))
    metrics = summary.metrics(part.seed)
    progress.log(", ".join(f"{name} {metrics[name]:.4g}" for name in TOLD if name in metrics))
    attempt.commit(metrics=metrics, facts=facts)


class Units(ConversationRows):
    """Ranges of pairs, whose completions one opened reward scores."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._part = part = EvaluateRewardPart.model_validate(attempt.job.spec)
        self._add_units("pairs", part.split, part.pairs_per_unit, part.limit)

    def _conversations(self, unit: ConversationRange) -> Iterator[Conversation]:
        order = KeyedPermutation(len(unit.shards), self._part.seed, "labelled pairs")
        return (unit.shards.conversation(order(index)) for index in range(*unit.span))

    def _row(self, pair: Conversation, number: int) -> Row:
        if not pair.preference:
            return {"id": pair.id, "dropped": "without_label"}
        if len(set(pair.completions)) < 2:
            return {"id": pair.id, "dropped": "equal_completions"}
        items = [
            Scored(messages=pair.prompt, completion=text, answer=pair.completions[0], metadata=pair.metadata)
            for text in pair.completions
        ]
        try:
            chosen, rejected = score_prompt(self._reward, items, pair.id)
        except TooLongError:
            return {"id": pair.id, "dropped": "too_long"}
        row = {"id": pair.id, "source": number, "chosen": chosen, "rejected": rejected}
        return row | {"characters": [len(text) for text in pair.completions]} | answers_of(self._reward)

    @cached_property
    def _reward(self) -> Reward:
        prepare_process(self._attempt.job.launch.cpu_threads)
        return open_of_part(self._part.reward, self._attempt)


class AgreementSummary:
    """A summary of the pairs among the rows given to `add`."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._pairs: list[JudgedPair] = []
        self._outside: list[float] = []
        self._dropped: Counter[str] = Counter()

    def add(self, row: Row) -> Row:
        if "dropped" in row:
            self._dropped[row["dropped"]] += 1
            return row
        answers = row.get("answers", ())
        self._outside += [answer["outside"] for answer in answers]
        chosen, rejected = row["characters"]
        first = _first({tuple(answer["about"]): answer["probabilities"] for answer in answers})
        source = self._names[row["source"]]
        self._pairs.append(JudgedPair(source, row["chosen"], row["rejected"], chosen - rejected, first))
        return row

    def metrics(self, seed: int) -> dict[str, float]:
        """The metrics of the stage. RewardError when there are no pairs, or all rewards are the same."""
        if not self._pairs:
            raise RewardError(
                f"there is no labelled pair to compare with ({counts_in_words(self._dropped)})."
                " Fix: use conversations whose rows have chosen and rejected, a split that holds some,"
                " and max_tokens of the reward for their length"
            )
        values = {reward for pair in self._pairs for reward in (pair.chosen, pair.rejected)}
        if len(values) == 1:
            raise RewardError(
                f"the reward is {values.pop():g} for every completion of {len(self._pairs)} pairs: it is"
                " constant, and agrees with no label."
                " Fix: correct the function, the model or the template of the reward"
            )
        metrics = agreement(self._pairs, seed) | dict(self._dropped)
        if self._outside:
            metrics["outside"] = sum(self._outside) / len(self._outside)
            metrics["outside_max"] = max(self._outside)
        return metrics


def _first(answers: dict[tuple[int, ...], list[float]]) -> tuple[float, float] | None:
    """The probability a judge gave, for both orders, to the completion shown first; None if it has none."""
    if (0, 1) not in answers:
        return None
    shares = [answers[order][0] / sum(answers[order]) for order in ((0, 1), (1, 0))]
    return shares[0], shares[1]


@dataclass(frozen=True)
class JudgedPair:
    """A labelled pair and the rewards of its completions."""

    source: str
    chosen: float  # reward of the completion that the label prefers
    rejected: float
    longer: int  # characters of the chosen completion less those of the rejected one
    # probabilities that the completion shown first is better: with the chosen one first, then with the
    # rejected one first
    first: tuple[float, float] | None = None

    @property
    def agrees(self) -> float:
        """1 if the reward prefers the chosen completion, 1/2 if the rewards are equal, else 0."""
        return _prefers(self.chosen, self.rejected)


def agreement(pairs: Sequence[JudgedPair], seed: int) -> dict[str, float]:
    """The metrics of `specs.stages.evaluate_reward`, without the mass outside the scale."""
    figures: dict[str, list[float]] = {
        "accuracy": [pair.agrees for pair in pairs],
        "ties": [float(pair.chosen == pair.rejected) for pair in pairs],
        "accuracy/longer": [pair.agrees for pair in pairs if pair.longer > 0],
        "accuracy/shorter": [pair.agrees for pair in pairs if pair.longer < 0],
        # the reward's preference for the longer completion, minus the label's
        "length_bias": [
            pair.agrees - 1 if pair.longer > 0 else 1 - pair.agrees for pair in pairs if pair.longer
        ],
    }
    for name in dict.fromkeys(pair.source for pair in pairs):
        figures[f"{OF_SOURCE}{name}"] = [pair.agrees for pair in pairs if pair.source == name]
    compared = [pair.first for pair in pairs if pair.first is not None]
    # p(chosen) is `first` where the chosen completion is shown first, and 1 - `second` where it is not
    figures["accuracy/compared"] = [_prefers(first, second) for first, second in compared]
    figures["order_bias"] = [(first + second) / 2 - 0.5 for first, second in compared]
    figures["order_consistency"] = [float((first - 0.5) * (0.5 - second) > 0) for first, second in compared]
    metrics = {"pairs": float(len(pairs))}
    for name, values in figures.items():
        if values:
            metrics |= mean_with_interval(name, np.asarray(values, np.float64), seed=seed)
    return metrics


def _prefers(preferred: float, other: float) -> float:
    return 0.5 if preferred == other else float(preferred > other)
