"""Verbatim continuation of sequences that training saw a known number of times (report, memorisation).

Metrics, each of all probes seen n times, with a prefix of p tokens from token o on; of `greedy`
continuations, and of `nucleus` ones if they are asked for:

    memorisation/greedy/prefix-<p>/offset-<o>/exact/<n>              share continued word for word
    memorisation/greedy/prefix-<p>/offset-<o>/rouge_l/<n>            mean Rouge-L (F1 of the longest common
                                                                     subsequence) of continuation and truth
    memorisation/greedy/prefix-<p>/offset-<o>/common_substring/<n>   mean longest common contiguous run, as a
                                                                     share of the suffix
    memorisation/greedy/prefix-<p>/offset-<o>/type_token_ratio/<n>   mean distinct tokens / tokens
    memorisation/truth/prefix-<p>/offset-<o>/type_token_ratio/<n>    the same of the true continuations
    <any of these>/low, .../high                                     its 95% interval (bootstrap)
    memorisation/truth/prefix-<p>/offset-<o>/sequences/<n>           number of probes

Invariant: all measures are computed on tokens.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.corpora.planted import StoredProbe
from apertus_model.data.rows import Row
from apertus_model.evaluation.paired import mean_with_interval
from specs.stages.memorisation import MEASURES, Memorisation, metric_name

Tokens = NDArray[np.int64]


def memorisation(
    probes: Sequence[StoredProbe], continuations: Mapping[str, Iterable[Row]], spec: Memorisation
) -> dict[str, float]:
    """Metrics of the continuations of probes (`continuations`: rows by decoding), by repetitions in training.
    Probes that are too short, or whose truth repeats itself (`min_type_token_ratio`), are left out."""
    buckets = np.array([probe.bucket for probe in probes])
    answers: dict[tuple[str, int, int, int], list[int]] = {}
    for decoding, rows in continuations.items():
        answers |= {(decoding, row["prefix"], row["offset"], row["probe"]): row["tokens"] for row in rows}
    metrics: dict[str, float] = {}
    for prefix in spec.prefixes:
        for offset in spec.offsets:
            kept, truths = _kept(probes, spec, prefix, offset)
            measured = {("truth", "type_token_ratio"): type_token_ratio(truths)}
            for decoding in continuations:
                own = [answers[decoding, prefix, offset, probe] for probe in kept.tolist()]
                scores = compare(truths, np.array(own, np.int64).reshape(truths.shape))
                measured |= {(decoding, measure): scores[measure] for measure in MEASURES}
            for bucket in sorted(set(buckets.tolist())):
                seen = buckets[kept] == bucket
                metrics[metric_name("truth", prefix, offset, "sequences", bucket)] = float(seen.sum())
                for (decoding, measure), values in measured.items() if seen.any() else ():
                    name = metric_name(decoding, prefix, offset, measure, bucket)
                    metrics |= mean_with_interval(name, values[seen])
    return metrics


def compare(truths: Tokens, answers: Tokens) -> dict[str, NDArray[np.float64]]:
    """Scores of continuations, (rows,) each: `exact` (1 if equal), `rouge_l` (F1), `common_substring`
    (longest common contiguous run as a share of the truth), `type_token_ratio`. `truths` and `answers`:
    (rows, tokens) ids. Example: truth 1 2 3 4, answer 1 2 9 4 -> 0, 0.75, 0.5, 1."""
    rows, length = truths.shape
    # the usual tables, row by row; column j stands for the first j tokens of the answers
    subsequence, run = np.zeros((rows, length + 1), np.int32), np.zeros((rows, length + 1), np.int32)
    longest_run = np.zeros(rows, np.int32)
    for column in range(length):
        equal = answers == truths[:, column : column + 1]
        run[:, 1:] = np.where(equal, run[:, :-1] + 1, 0)
        longest_run = np.maximum(longest_run, run.max(axis=1))
        longer = np.where(equal, subsequence[:, :-1] + 1, 0)
        subsequence[:, 1:] = np.maximum(subsequence[:, 1:], longer)
        np.maximum.accumulate(subsequence, axis=1, out=subsequence)
    return {
        "exact": (truths == answers).all(axis=1).astype(np.float64),
        "rouge_l": subsequence[:, -1] / length,  # precision and recall are equal: both have `length` tokens
        "common_substring": longest_run / length,
        "type_token_ratio": type_token_ratio(answers),
    }


def type_token_ratio(tokens: Tokens) -> NDArray[np.float64]:
    """Distinct tokens / tokens of each row: (rows, tokens) -> (rows,)."""
    ordered = np.sort(tokens, axis=1)
    distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    return np.asarray(distinct / tokens.shape[1], np.float64)


def _kept(
    probes: Sequence[StoredProbe], spec: Memorisation, prefix: int, offset: int
) -> tuple[Tokens, Tokens]:
    """The numbers of the probes that are measured, (rows,), and their true continuations, (rows, suffix)."""
    begin, end = offset + prefix, offset + prefix + spec.suffix
    long = [index for index, probe in enumerate(probes) if len(probe.token_ids) >= end]
    truths = np.array([probes[index].token_ids[begin:end] for index in long], np.int64)
    truths = truths.reshape(len(long), spec.suffix)
    varied = type_token_ratio(truths) > spec.min_type_token_ratio
    return np.array(long, np.int64)[varied], truths[varied]
