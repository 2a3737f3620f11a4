"""The `pairs` part: for each prompt, a completion to prefer and one to reject.

Artifact:

    pairs.jsonl         for people: {"id", "prompt", "chosen", "rejected"}; a side is {"text", "reward",
                        "quantile", "origin"}, with "model" and "persona" where a generator made it
    tokens.npy          int32: prompt and completion of every sequence, one after the other
    lengths.npy         int64, (sequences,): tokens of each
    prompt_lengths.npy  int64, (sequences,): how many of them are the prompt's
    rewards.npy         float32, (sequences,): quantile of the reward among the reference rewards

Sequences 2k and 2k + 1 are the chosen and the rejected one of pair k, which is line k of `pairs.jsonl`.

Invariant: every prompt has a pair, or is counted under the reason for having none. (The part is a single
quick pass, without units.)
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from apertus_model.data.conversations.rows import COPIED_FACTS
from apertus_model.data.preferences import choice
from apertus_model.data.preferences.packed_pairs import SequenceWriter
from apertus_model.data.rows import Row, Rows, same_rows, to_line
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from specs.errors import StageError
from specs.rewards import RewardSpec
from specs.stages.preference_data import PairsPart

BINS = 10


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. StageError when there is no pair at all."""
    part = PairsPart.model_validate(attempt.job.spec)
    prompts, completions, rewards = (
        Rows(attempt.input_artifact(role)) for role in ("prompts", "completions", "rewards")
    )
    generated = choice.generated_by(attempt)
    models = [rows.artifact.manifest.facts["model"] for rows in generated]
    total = same_rows(prompts, completions, rewards, *generated)
    without: Counter[str] = Counter()
    lowest, highest = math.inf, -math.inf
    histogram = np.zeros(BINS, np.int64)
    quantiles: list[float] = []  # of each sequence
    origins: list[str] = []  # likewise
    people = attempt.workdir / "pairs.jsonl"
    with SequenceWriter(attempt.workdir) as writer, open(people, "w", encoding="utf-8") as file:
        for index, (prompt, sampled, values, *others) in enumerate(
            zip(prompts, completions, rewards, *generated, strict=True)
        ):
            assert prompt["id"] == sampled["id"] == values["id"]
            candidates = candidates_of(prompt, sampled, values, others, models)
            histogram += histogram_of([candidate.quantile for candidate in candidates])
            lowest = min([lowest, *values["offline"], *values["sampled"]])
            highest = max([highest, *values["offline"], *values["sampled"]])
            try:
                for pair in pairs_of(part, prompt, candidates, len(values["sampled"])):
                    for candidate in pair:
                        writer.add(prompt["tokens"], candidate.tokens)
                        quantiles.append(candidate.quantile)
                        origins.append(candidate.origin)
                    file.write(to_line(_shown(prompt, pair)))
            except choice.NoPair as reason:
                without[str(reason)] += 1
            progress.update(index + 1, total, "prompts")
    if not quantiles:
        reward = RewardSpec.model_validate(rewards.artifact.manifest.spec["reward"])
        raise StageError(_why_none(total, without, reward.name, lowest, highest))
    np.save(attempt.workdir / "rewards.npy", np.array(quantiles, np.float32), allow_pickle=False)
    for name in ["pairs.jsonl", *writer.finish(), "rewards.npy"]:
        attempt.put(attempt.workdir / name, name)
    pairs = len(quantiles) // 2
    metrics = {
        "pairs": pairs,
        "prompts": total,
        "without_pair": dict(without),
        "mean_quantile_chosen": float(np.mean(quantiles[::2])),
        "mean_quantile_rejected": float(np.mean(quantiles[1::2])),
        "offline_chosen": origins[::2].count("offline") / pairs,
        "offline_rejected": origins[1::2].count("offline") / pairs,
        "tokens": sum(writer.lengths),
        "quantile_histogram": histogram.tolist(),
    }
    reasons = "".join(f", {n} without: {reason}" for reason, n in without.items())
    progress.log(f"{pairs} pairs of {total} prompts{reasons}")
    facts = prompts.artifact.manifest.facts
    attempt.commit(
        metrics=metrics,
        facts={name: facts[name] for name in COPIED_FACTS} | {"pairs": pairs, "sequences": len(quantiles)},
    )


def _why_none(total: int, without: Counter[str], reward: str, lowest: float, highest: float) -> str:
    """The message of a StageError. `lowest` and `highest` are the extreme rewards of all completions."""
    if without["equal_rewards"] < total:
        return (
            f"none of the {total} prompts has a pair: {dict(without)}."
            " Fix: sample more completions per prompt, or use another reward"
        )
    values = f"{lowest:g}" if lowest == highest else f"one value, from {lowest:g} to {highest:g} by prompt"
    return (
        f"the reward {reward} gives all completions of a prompt {values}, for each of the {total} prompts, so"
        " it prefers none."
        " Fix: use a reward that tells the completions of a prompt apart, or completions that differ"
        " more (completions.n, completions.temperature)"
    )


def candidates_of(
    prompt: Row, sampled: Row, rewards: Row, generated: Sequence[Row] = (), models: Sequence[str] = ()
) -> list[choice.Candidate]:
    """A prompt's completions with their quantiles, offline ones first; none without reference rewards."""
    if not rewards["sampled"]:
        return []
    completed: dict[str, list[tuple[Row, dict[str, Any]]]] = {
        "offline": list(choice.offline_completions(prompt, generated, models)),
        "sampled": [(completion, {}) for completion in sampled["completions"]],
    }
    return [
        choice.Candidate(completion["text"], tuple(completion["tokens"]), reward, quantile, origin, maker)
        for origin, those in completed.items()
        for (completion, maker), reward, quantile in zip(
            those, rewards[origin], choice.quantiles(rewards[origin], rewards["sampled"]), strict=True
        )
    ]


def pairs_of(
    part: PairsPart, prompt: Row, candidates: list[choice.Candidate], reference: int
) -> list[choice.Pair]:
    """The pairs of a prompt, at most `part.pairs`. NoPair when there is none."""
    most = part.max_tokens - len(prompt["tokens"])
    short = [candidate for candidate in candidates if len(candidate.tokens) <= most]
    random = choice.random_of(part.seed, prompt["id"])
    pairs = [choice.choose(short, random, reference=reference, worst_quantile=part.worst_quantile)]
    if part.pairs > 1:
        try:
            pairs.append(choice.choose_further(short, pairs[0], random))
        except choice.NoPair:
            pass
    return pairs


def _shown(prompt: Row, pair: choice.Pair) -> Row:
    """The line of a pair in `pairs.jsonl`."""
    row: Row = {"id": prompt["id"], "prompt": prompt["text"]}
    for side, candidate in zip(("chosen", "rejected"), pair, strict=True):
        shown = {name: getattr(candidate, name) for name in ("text", "reward", "quantile", "origin")}
        row[side] = {**shown, **candidate.maker}
    return row


def histogram_of(values: Sequence[float]) -> np.ndarray:
    """Counts of quantiles, (BINS,) int64, in bins of equal width; the last bin includes its right edge."""
    return np.histogram(values, bins=BINS, range=(0, 1))[0]
