from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apertus_model.data.preferences.packed_pairs import PreferenceDataError
from apertus_model.data.preferences.reward_samples import RewardSamples
from infra.store import StoreError

PAD = 10


def put(folder: Any, sequences: list[list[int]], margins: list[float], sources: list[int]) -> Any:
    """Stored pairs, each sequence with a prompt of one token, as the part of an artifact that is read."""
    arrays = {
        "tokens": np.concatenate(sequences).astype(np.int32),
        "lengths": np.array([len(one) for one in sequences]),
        "prompt_lengths": np.ones(len(sequences), np.int64),
        "margins": np.array(margins, np.float32),
        "sources": np.array(sources, np.int32),
    }
    for name, array in arrays.items():
        np.save(folder / f"train-{name}.npy", array)
    return SimpleNamespace(
        local=lambda name: folder / name,
        path=str(folder),
        manifest=SimpleNamespace(facts={"pad_id": PAD}),
    )


SEQUENCES = [[1, 2, 3], [1, 4], [5, 6, 7, 8, PAD], [5, PAD]]


def test_a_sequence_is_rewarded_at_its_last_token_even_if_that_is_the_padding_token(tmp_path: Any) -> None:
    samples = RewardSamples.open(put(tmp_path, SEQUENCES, [0.5, 2.0], [0, 1]), "train", sequence_length=14)
    assert (samples.rows, samples.sequences) == (1, 4)
    row = samples.row(0)
    assert row.input.tolist() == [1, 2, 3, 1, 4, 5, 6, 7, 8, PAD, 5, PAD, PAD, PAD]
    assert row.labels.tolist() == [
        *[-100, -100, 3, -100, 4, -100, -100, -100, -100, PAD, -100, PAD, -100, -100]
    ]
    assert row.segments.tolist() == [-1, -1, 0, -1, 1, -1, -1, -1, -1, 2, -1, 3, -1, -1]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1, 0, 1]
    assert (row.margins.tolist(), row.present.tolist()) == ([0.5, 2.0], [True, True])


def test_the_pairs_of_one_source_are_rows_of_their_own(tmp_path: Any) -> None:
    samples = RewardSamples.open(put(tmp_path, SEQUENCES, [0.5, 2.0], [0, 1]), "train", sequence_length=14)
    row = samples.of_source(1).row(0)
    assert row.input.tolist()[:7] == [5, 6, 7, 8, PAD, 5, PAD]
    assert (row.margins.tolist(), samples.of_source(2).rows) == ([2.0], 0)


def test_a_pair_that_is_longer_than_a_row_and_arrays_that_do_not_fit_are_refused(tmp_path: Any) -> None:
    stored = put(tmp_path, SEQUENCES, [0.5, 2.0], [0, 1])
    with pytest.raises(PreferenceDataError, match="a pair has 7 tokens"):
        RewardSamples.open(stored, "train", sequence_length=6)
    np.save(tmp_path / "train-margins.npy", np.zeros(3, np.float32))
    with pytest.raises(StoreError, match="do not belong together"):
        RewardSamples.open(stored, "train", sequence_length=14)
