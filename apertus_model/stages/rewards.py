"""The `rewards` part: rewards of all completions of every prompt, offline and sampled.

Artifact: `rewards-00000.jsonl`, ..., a line per prompt, in the order of the prompts: `{"id", "offline":
[...], "sampled": [...]}`, the values in the order of the completions (`data/preferences/choice.py`). With a
judge also `"answers": [{"key", "about", "probabilities", "outside"}]` (`JudgedAnswer`), and its constitution
in `constitution.txt`.

Invariant: a reward sees the completions of one prompt at a time, so no value depends on the division into
units.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import combinations

import numpy as np

from apertus_model.data.preferences.choice import generated_by, offline_completions
from apertus_model.data.rows import Row, Rows, read_units, same_rows, write_rows, write_unit
from apertus_model.progress import Progress
from apertus_model.rewards import Reward, Scored
from apertus_model.rewards.judge import Judge
from apertus_model.rewards.registry import open_of_part, read_constitution, score_prompt
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import prepare_process
from apertus_model.work import Result, run_units
from apertus_model.work.units import units_of
from infra.store import Attempt
from specs.rewards import RewardSpec
from specs.stages.preference_data import RewardsPart

CONSTITUTION = "constitution.txt"


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. RewardError for a reward that cannot be opened, raises, or is not a finite number."""
    part = RewardsPart.model_validate(attempt.job.spec)
    put_constitution(part.reward, attempt)
    units = run_units(Units(attempt), attempt, stop, progress, processes=part.WORKERS)
    summary = RewardSummary()
    facts = write_rows(attempt, "rewards", map(summary.add, read_units(units)))
    metrics = summary.metrics()
    progress.log(", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    attempt.commit(metrics=metrics, facts=facts)


class Units:
    """Ranges of prompts, whose completions one opened reward scores."""

    def __init__(self, attempt: Attempt) -> None:
        part = RewardsPart.model_validate(attempt.job.spec)
        self._attempt, self._spec = attempt, part.reward
        self._prompts, self._completions = (
            Rows(attempt.input_artifact(role)) for role in ("prompts", "completions")
        )
        self._generated = generated_by(attempt)
        total = same_rows(self._prompts, self._completions, *self._generated)
        self.units = units_of("rewards", total, part.prompts_per_unit)

    def run(self, key: str) -> Result:
        def scored(i: int) -> Row:
            generated = [rows[i] for rows in self._generated]
            return score_row(self._reward, self._prompts[i], self._completions[i], generated)

        span = self.units[key]
        return write_unit(span, map(scored, range(*span)), self._attempt.workdir / f"{key}.jsonl")

    @cached_property
    def _reward(self) -> Reward:
        prepare_process(self._attempt.job.launch.cpu_threads)
        return open_of_part(self._spec, self._attempt)


def score_row(reward: Reward, prompt: Row, sampled: Row, generated: Sequence[Row] = ()) -> Row:
    """Rewards of the offline completions of a prompt and of those sampled for it."""
    assert prompt["id"] == sampled["id"]
    offline = [completion for completion, _ in offline_completions(prompt, generated)]
    completions = [*offline, *sampled["completions"]]
    items = [
        Scored(
            messages=prompt["messages"],
            completion=completion["text"],
            finished=completion.get("finished", True),
            answer=prompt["answer"],
            metadata=prompt["metadata"],
            tokens=tuple(completion["tokens"]),
        )
        for completion in completions
    ]
    values = score_prompt(reward, items, f"{prompt['id']} ({prompt['text'][-80:]!r})")
    row = {"id": prompt["id"], "offline": values[: len(offline)], "sampled": values[len(offline) :]}
    return row | answers_of(reward)


def answers_of(reward: Reward) -> Row:
    """The answers of a judge about the completions that it scored last; empty for any other reward."""
    if not isinstance(reward, Judge):
        return {}
    return {"answers": [answer._asdict() | {"outside": answer.outside} for answer in reward.answers]}


def put_constitution(reward: RewardSpec, attempt: Attempt) -> None:
    """Stores the constitution of a judge in the artifact that it was used for."""
    if reward.judge is not None:
        attempt.write_bytes(CONSTITUTION, read_constitution(reward.judge.constitution).encode())


class RewardSummary:
    """Counts and moments over the rows given to `add`."""

    def __init__(self) -> None:
        self._offline: list[float] = []
        self._sampled: list[float] = []
        self._deviations: list[float] = []
        self._outside: list[float] = []
        self._pairs = self._ties = self._equal = 0

    def add(self, row: Row) -> Row:
        self._offline += row["offline"]
        self._sampled += row["sampled"]
        self._deviations.append(float(np.std(row["sampled"])))
        self._outside += [answer["outside"] for answer in row.get("answers", ())]
        equal = [first == second for first, second in combinations(row["sampled"], 2)]
        self._pairs += len(equal)
        self._ties += sum(equal)
        values = [*row["offline"], *row["sampled"]]
        self._equal += len(values) > 1 and len(set(values)) == 1
        return row

    def metrics(self) -> dict[str, float]:
        """The metrics of the part. `prompts_with_equal_rewards`: prompts whose completions all have the same
        reward; `ties`: share of equal rewards among the pairs of completions sampled for the same prompt;
        `standard_deviation`: over all sampled rewards; `standard_deviation_within`: mean over the prompts of
        the standard deviation within a prompt; `outside`, `outside_max`: the mean and the largest probability
        that a judge gave to anything but an answer."""
        metrics: dict[str, float] = {"offline": len(self._offline), "sampled": len(self._sampled)}
        metrics["prompts_with_equal_rewards"] = self._equal
        if self._offline:
            metrics["mean_offline"] = float(np.mean(self._offline))
        metrics["mean_sampled"] = float(np.mean(self._sampled))
        metrics["standard_deviation"] = float(np.std(self._sampled))
        metrics["standard_deviation_within"] = float(np.mean(self._deviations))
        if self._pairs:
            metrics["ties"] = self._ties / self._pairs
        if self._outside:
            metrics["outside"], metrics["outside_max"] = float(np.mean(self._outside)), max(self._outside)
        return metrics
