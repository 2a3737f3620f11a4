"""Answers to held-out prompts: their rewards, the comparison with another model's, and the divergence from
that model.

Metrics:

    reward/mean                             mean reward of the sampled answers, over prompts
    reward/prompts                          number of prompts
    reward/finished                         share of the answers that the model ended
    reward/best/<k>                         mean over prompts of the highest reward of k answers, expected for
                                            k of the sampled ones (pass@k of arXiv 2107.03374 for rewards of 0
                                            and 1); k: powers of 2
    reward/majority/<k>                     mean reward of the answer, among the first k, whose last line most
                                            of them have; the earliest of equals, so that
                                            2 answers give that of 1
    reward/against                          mean reward of the other model's answers to the same prompts, with
                                            the same seeds
    reward/difference                       mean over prompts of own - other reward; .../low and .../high: its
                                            95% confidence interval
    reward/wins                             share of the prompts with the higher own reward, ties counted half
    kl/against                              mean over the tokens of own answers of KL(own || other), over the
                                            whole vocabulary, in nats

Invariant: answers are compared prompt by prompt; both models saw the same prompts in the same order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from apertus_model.data.rows import Row, Rows, same_rows
from apertus_model.data.tokens.packing import fill_row, pack
from apertus_model.data.tokens.stream import Sample
from apertus_model.evaluation.paired import compare
from apertus_model.progress import Progress
from apertus_model.trainer.evaluator import Evaluator
from infra.store import Artifact
from specs.stages.evaluate import several


@dataclass(frozen=True)
class Answers:
    """Prompts, a model's completions, and their rewards (None without a reward), by the same indices."""

    prompts: list[Row]
    completions: list[Row]
    rewards: list[Row] | None
    pad_id: int
    seconds: float = 0.0  # of sampling, summed over workers; 0 if no answer has a token

    @classmethod
    def read(cls, prompts: Artifact, completions: Artifact, rewards: Artifact | None) -> Answers:
        """Opens stored answers. StoreError when they do not belong together."""
        asked, answered = Rows(prompts), Rows(completions)
        rewarded = [Rows(rewards)] if rewards is not None else []
        same_rows(asked, answered, *rewarded)
        pad_id = int(prompts.manifest.facts["pad_id"])
        sampled = completions.manifest.metrics
        rate = sampled["tokens_per_second"]
        seconds = sampled["tokens"] / rate if rate else 0.0
        return cls(list(asked), list(answered), list(rewarded[0]) if rewarded else None, pad_id, seconds)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt with its answer."""
        return max(len(tokens) for tokens, _ in self.sequences())

    def mean_rewards(self) -> list[float] | None:
        """The mean reward of the sampled answers to each prompt."""
        return [fmean(row["sampled"]) for row in self.rewards] if self.rewards is not None else None

    def shown(self, count: int, name: str, other: Answers | None, other_name: str) -> dict[str, Any]:
        """The first `count` answers, for people: `{"prompts": [{"id", "prompt", "completions": [{"model",
        "text", "reward"}]}]}`."""
        models = [(name, self)] + ([(other_name, other)] if other is not None else [])
        prompts = []
        for index, prompt in enumerate(self.prompts[:count]):
            completions = [
                {
                    "model": model,
                    "text": answers.completions[index]["completions"][0]["text"],
                    "reward": answers.rewards[index]["sampled"][0] if answers.rewards is not None else None,
                }
                for model, answers in models
            ]
            for answer in prompt["completions"][:1]:
                completions.append({"model": "documented", "text": answer["text"], "reward": None})
            question = prompt["messages"][-1]["content"]
            prompts.append({"id": prompt["id"], "prompt": question, "completions": completions})
        return {"prompts": prompts}

    def sequences(self) -> Iterable[tuple[list[int], int]]:
        """Yields (tokens, number of prompt tokens) of every answer."""
        for prompt, row in zip(self.prompts, self.completions, strict=True):
            for completion in row["completions"]:
                yield prompt["tokens"] + completion["tokens"], len(prompt["tokens"])


def rewards(
    own: Answers, other: Answers | None, name: str, other_name: str, *, answers: int = 1
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics of the rewards, those of several answers for up to `answers`, and the table of
    `rewards.json`: `{"model", "against", "rows": [{"id", "reward", "against"}]}`."""
    finished = fmean(completion["finished"] for row in own.completions for completion in row["completions"])
    metrics = {"reward/prompts": float(len(own.prompts)), "reward/finished": finished}
    scores, others = own.mean_rewards(), other.mean_rewards() if other is not None else None
    if scores is None:
        return metrics, {"model": name, "against": None, "rows": []}
    metrics |= {"reward/mean": fmean(scores), **_of_several(own, answers)}
    if others is not None:
        compared = compare(scores, others)
        metrics |= {
            "reward/against": fmean(others),
            "reward/difference": compared.difference,
            "reward/difference/low": compared.low,
            "reward/difference/high": compared.high,
            "reward/wins": compared.wins,
        }
    against: list[Any] = others or [None] * len(scores)
    columns = zip(own.prompts, scores, against, strict=True)
    rows = [{"id": prompt["id"], "reward": score, "against": other} for prompt, score, other in columns]
    return metrics, {"model": name, "against": other_name if others is not None else None, "rows": rows}


def _of_several(own: Answers, answers: int) -> dict[str, float]:
    """The rewards of the best and of the most frequent of up to `answers` answers."""
    sampled = [row["sampled"] for row in own.rewards or ()]
    texts = [[answer["text"] for answer in row["completions"]] for row in own.completions]
    metrics = {}
    for k in several(answers):
        metrics[f"reward/best/{k}"] = fmean(expected_best(values, k) for values in sampled)
        voted = (values[most_frequent(row[:k])] for values, row in zip(sampled, texts, strict=True))
        metrics[f"reward/majority/{k}"] = fmean(voted)
    return metrics


def expected_best(values: Sequence[float], k: int) -> float:
    """The expected maximum of k of the values, drawn without replacement."""
    ways = math.comb(len(values), k)
    return sum(value * (math.comb(rank, k - 1) / ways) for rank, value in enumerate(sorted(values)))


def most_frequent(texts: Sequence[str]) -> int:
    """The index of the first text with the last line that most texts have."""
    lines = [text.strip().rpartition("\n")[2] for text in texts]
    return lines.index(Counter(lines).most_common(1)[0][0])


def divergence(
    model: Evaluator, reference: Evaluator, own: Answers, *, sequence_length: int, progress: Progress
) -> dict[str, float]:
    """Divergence of the model from the reference on its own answers. Collective."""
    rows = answer_rows(list(own.sequences()), sequence_length, own.pad_id)
    nats, tokens = model.divergence(reference, rows)
    progress.update(1, 1, "comparisons")
    return {"kl/against": nats / tokens}


def answer_rows(sequences: list[tuple[list[int], int]], sequence_length: int, pad_id: int) -> list[Sample]:
    """Packed rows whose labels are answers: `sequences` are (tokens, number of prompt tokens)."""
    pieces = [
        (np.array(tokens, dtype=np.int64), np.arange(len(tokens)) >= prompt) for tokens, prompt in sequences
    ]
    packed = pack(np.array([tokens.size for tokens, _ in pieces], dtype=np.int64), sequence_length)
    rows = (fill_row([pieces[index] for index in row], sequence_length, pad_id) for row in packed)
    return [Sample(row.input, row.labels, row.positions, 0) for row in rows]
