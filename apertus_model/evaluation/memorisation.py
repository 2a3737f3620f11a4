"""Verbatim continuation of sequences that training saw a known number of times (report, appendix on
memorisation).

Metrics:

    memorisation/exact/<n>                  share of the sequences seen n times that are continued word for
                                            word
    memorisation/rouge_l/<n>                mean Rouge-L (F1 of the longest common subsequence) of
                                            continuation and truth
    memorisation/common_substring/<n>       mean longest common contiguous run, as a share of the suffix
    memorisation/<any of these>/<n>/low, .../high   its 95% interval over the sequences (bootstrap)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from apertus_model.evaluation.paired import interval
from apertus_model.progress import Progress
from apertus_model.trainer.evaluator import Evaluator


def memorisation(
    evaluator: Evaluator, probes: Sequence[dict[str, Any]], *, prefix: int, suffix: int, progress: Progress
) -> dict[str, float]:
    """Metrics of the greedy continuation of probes after their first `prefix` tokens, by repetitions in
    training.

    Args:
        evaluator: the model.
        probes: `{"bucket": repetitions, "token_ids": [...]}` each; those shorter than prefix + suffix are
            left out.
        prefix: number of tokens given.
        suffix: number of tokens compared.
        progress: updated after each batch.
    """
    long_enough = [probe for probe in probes if len(probe["token_ids"]) >= prefix + suffix]
    scores: dict[int, list[tuple[float, float, float]]] = {}
    for begin in range(0, len(long_enough), evaluator.batch_size):
        batch = long_enough[begin : begin + evaluator.batch_size]
        tokens = torch.tensor([probe["token_ids"][: prefix + suffix] for probe in batch], dtype=torch.int64)
        continued = evaluator.continue_greedily(tokens[:, :prefix], suffix)
        for probe, truth, answer in zip(batch, tokens[:, prefix:].tolist(), continued.tolist(), strict=True):
            scores.setdefault(probe["bucket"], []).append(compare(truth, answer))
        progress.update(begin + len(batch), len(long_enough), "sequences")
    metrics: dict[str, float] = {}
    for bucket, rows in sorted(scores.items()):
        for name, values in zip(("exact", "rouge_l", "common_substring"), np.array(rows).T, strict=True):
            low, high = interval(values)
            metrics |= {
                f"memorisation/{name}/{bucket}{end}": value
                for end, value in (("", values.mean()), ("/low", low), ("/high", high))
            }
    return {name: float(value) for name, value in metrics.items()}


def compare(truth: Sequence[int], answer: Sequence[int]) -> tuple[float, float, float]:
    """(1 if equal, Rouge-L F1, longest common contiguous run as a share of the truth) of two sequences of
    tokens.

    Example: truth 1 2 3 4, answer 1 2 9 4 -> (0, 0.75, 0.5).
    """
    subsequence = [0] * (len(answer) + 1)
    run = [0] * (len(answer) + 1)
    longest_run = 0
    for token in truth:
        diagonal_subsequence = diagonal_run = 0
        for column, other in enumerate(answer, start=1):
            above_subsequence, above_run = subsequence[column], run[column]
            if token == other:
                subsequence[column] = diagonal_subsequence + 1
                run[column] = diagonal_run + 1
                longest_run = max(longest_run, run[column])
            else:
                subsequence[column] = max(above_subsequence, subsequence[column - 1])
                run[column] = 0
            diagonal_subsequence, diagonal_run = above_subsequence, above_run
    rouge_l = 2 * subsequence[-1] / (len(truth) + len(answer))
    return float(list(truth) == list(answer)), rouge_l, longest_run / len(truth)
