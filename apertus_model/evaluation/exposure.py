"""Exposure of planted canaries (arXiv 1802.08232): the rank of each canary by the loss of its text, among
texts that could have been drawn in its place.

    memorisation/exposure/<n>                mean over the canaries that training saw n times of
                                             log2(alternatives + 1) - log2(rank), in bits
    memorisation/exposure/<n>/low, .../high  its 95% interval (bootstrap)

Rank 1 is the most likely text. An alternative as likely as the canary counts as more likely, so a model that
cannot tell them apart gives 0. With all secrets as alternatives this is the exposure of the paper, else its
estimate by sampling.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.corpora.planted import Encode, PlantedDocument, alternatives
from apertus_model.data.tokens.packing import fill_row
from apertus_model.data.tokens.stream import IGNORE_INDEX
from apertus_model.evaluation.paired import mean_with_interval
from apertus_model.progress import Progress
from apertus_model.trainer.evaluator import Evaluator
from specs.planted import Canaries
from specs.stages.memorisation import Exposure, exposure_name


class ScoredRow(NamedTuple):
    """A row with one text."""

    input: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    segments: NDArray[np.int64]


class ExposureTexts:
    """The canaries, each with its alternatives, as tokens."""

    def __init__(
        self,
        canaries: Canaries,
        documents: Sequence[PlantedDocument],
        spec: Exposure,
        encode: Encode,
        eos_id: int,
        row_multiple: int,
    ) -> None:
        """`canaries`: the generator of the stored `documents`; `encode`: from text to tokens without the end;
        `row_multiple`: divides the number of tokens in a row, for ranks that share rows."""
        self._eos_id = eos_id
        self._buckets = np.array([document.bucket for document in documents])
        self._texts: list[list[list[int]]] = []  # of each canary, its own first
        for document in documents:
            assert document.secret is not None, "a canary has one"
            others = alternatives(canaries, int(document.name), document.secret, spec.alternatives, spec.seed)
            self._texts.append([[*encode(text), eos_id] for text in (document.text, *others)])

        longest = max(len(tokens) for texts in self._texts for tokens in texts)
        self.length = -(-longest // row_multiple) * row_multiple  # tokens of a row

    def measure(self, evaluator: Evaluator, progress: Progress) -> dict[str, float]:
        """Computes the metrics. Collective."""
        exposures = np.empty(len(self._texts))
        for index, texts in enumerate(self._texts):
            # one text to a row: equal texts have equal losses
            rows = [self._row(tokens) for tokens in texts]
            losses = -evaluator.of_sequences(rows, 1)[:, 0].double().numpy()
            exposures[index] = exposure(losses[0], losses[1:])
            progress.update(index + 1, len(self._texts), "canaries")
        metrics: dict[str, float] = {}
        for bucket in sorted(set(self._buckets.tolist())):
            metrics |= mean_with_interval(exposure_name(bucket), exposures[self._buckets == bucket])
        return metrics

    def _row(self, tokens: list[int]) -> ScoredRow:
        ids = np.array(tokens, dtype=np.int64)
        row = fill_row([(ids, np.ones(ids.size, bool))], self.length, self._eos_id)
        return ScoredRow(row.input, row.labels, row.positions, np.where(row.labels == IGNORE_INDEX, -1, 0))


def exposure(loss: float, others: NDArray[np.float64]) -> float:
    """log2(n + 1) - log2(rank) of a text with this loss among n others, in bits."""
    return math.log2(len(others) + 1) - math.log2(1 + int((others <= loss).sum()))
