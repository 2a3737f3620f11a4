from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apertus_model.data.preferences.packed_pairs import PreferenceDataError
from apertus_model.data.preferences.samples import PreferenceSamples
from infra.store import StoreError

PAD = 10
Sequence = tuple[list[int], list[int]]


def _artifact(folder: Path, arrays: dict[str, Any]) -> Any:
    """Stored arrays, as the part of an artifact that is read."""
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    manifest = SimpleNamespace(kind="pairs")
    return SimpleNamespace(local=lambda name: folder / name, path=str(folder), manifest=manifest)


def _pairs(folder: Path, sequences: list[Sequence], rewards: list[float] | None = None) -> Any:
    """Sequences as (prompt, completion)."""
    tokens = [prompt + completion for prompt, completion in sequences]
    arrays = {
        "tokens": np.concatenate(tokens).astype(np.int32),
        "lengths": np.array([len(one) for one in tokens], np.int64),
        "prompt_lengths": np.array([len(prompt) for prompt, _ in sequences], np.int64),
        "rewards": np.array(rewards or [0.0] * len(tokens), np.float32),
    }
    return _artifact(folder, arrays)


def _many(count: int) -> list[Sequence]:
    """Pairs of different lengths, every token of which tells where it is from."""
    random = np.random.default_rng(0)
    return [
        (
            [1000 * index + 1] * int(random.integers(1, 4)),
            [1000 * index + 10 + k for k in range(random.integers(1, 6))],
        )
        for index in range(2 * count)
    ]


def _open(pairs: Any, log_probabilities: Any = None, length: int = 24) -> PreferenceSamples:
    return PreferenceSamples.open(pairs, log_probabilities, sequence_length=length, pad_id=PAD)


def test_a_row_holds_both_sides_as_documents_and_trains_completions_only(tmp_path: Path) -> None:
    pairs = _pairs(tmp_path / "p", [([1, 2], [3, 4, 5]), ([1, 2], [6])], [1.0, 0.25])
    reference = _artifact(tmp_path / "r", {"log_probabilities": np.array([-1.5, -2.5], np.float32)})
    sample = _open(pairs, reference, length=11).row(0)
    assert sample.input.tolist() == [1, 2, 3, 4, 5, 1, 2, 6, PAD, PAD, PAD]
    assert sample.labels.tolist() == [-100, 3, 4, 5, -100, -100, 6, -100, -100, -100, -100]
    assert sample.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]
    assert sample.segments.tolist() == [-1, 0, 0, 0, -1, -1, 1, -1, -1, -1, -1]
    assert sample.rewards.tolist() == [1.0, 0.25]
    assert sample.reference.tolist() == [-1.5, -2.5]
    assert sample.present.tolist() == [True, True]
    assert [sample.rewards.dtype, sample.reference.dtype, sample.input.dtype] == [
        np.float32,
        np.float32,
        np.int64,
    ]


def test_labelled_pairs_are_the_rows_of_pairs_of_the_same_sequences(tmp_path: Path) -> None:
    sequences = _many(5)
    pairs = _pairs(tmp_path / "p", sequences)
    names = ("tokens", "lengths", "prompt_lengths")
    arrays = {f"train-{name}": np.load(tmp_path / "p" / f"{name}.npy") for name in names}
    labelled = _artifact(tmp_path / "labelled", arrays)
    labelled.manifest.kind = "labelled_pairs"
    expected, found = _open(pairs), _open(labelled)
    assert found.rows == expected.rows > 1
    for row in range(found.rows):
        for one, other in zip(vars(found.row(row)).values(), vars(expected.row(row)).values(), strict=True):
            assert one.tolist() == other.tolist()


def test_without_log_probabilities_the_reference_is_zero(tmp_path: Path) -> None:
    assert (
        _open(_pairs(tmp_path / "p", _many(3))).row(0).reference.tolist()
        == [0.0] * _open(_pairs(tmp_path / "q", _many(3))).width
    )


def test_every_sequence_is_in_one_row_beside_its_other_side(tmp_path: Path) -> None:
    sequences = _many(20)
    rewards = [index / 64 for index in range(40)]
    reference = np.arange(40, dtype=np.float32)
    samples = _open(
        _pairs(tmp_path / "p", sequences, rewards),
        _artifact(tmp_path / "r", {"log_probabilities": reference}),
    )
    assert samples.sequences == 40
    seen = []
    for row in range(samples.rows):
        sample, ids = samples.row(row), samples.sequence_ids(row)
        seen += ids.tolist()
        assert (ids[::2] % 2 == 0).all() and (ids[1::2] == ids[::2] + 1).all()
        assert sample.present.tolist() == [True] * len(ids) + [False] * (samples.width - len(ids))
        for segment, sequence in enumerate(ids.tolist()):
            assert sample.labels[sample.segments == segment].tolist() == sequences[sequence][1]
            assert (sample.rewards[segment], sample.reference[segment]) == (rewards[sequence], sequence)
    assert sorted(seen) == list(range(40))
    assert samples.width % 2 == 0


def test_pairs_that_are_not_kept_stay_in_their_rows_without_labels(tmp_path: Path) -> None:
    pairs = _pairs(tmp_path / "p", _many(20))
    whole, some = _open(pairs), _open(pairs)
    kept = np.arange(20) % 3 == 0
    kept[whole.pairs_of(1)] = False
    some.keep(kept)
    assert some.trained_rows().tolist() == [
        row for row in range(whole.rows) if kept[whole.pairs_of(row)].any()
    ]
    assert 1 not in some.trained_rows() and whole.trained_rows().tolist() == list(range(whole.rows))
    for row in range(whole.rows):
        before, after, ids = whole.row(row), some.row(row), whole.sequence_ids(row)
        assert after.input.tolist() == before.input.tolist()
        assert after.positions.tolist() == before.positions.tolist()
        assert after.present.tolist()[: len(ids)] == kept[ids // 2].tolist()
        for segment, sequence in enumerate(ids):
            inside = before.segments == segment
            labels = before.labels[inside] if kept[sequence // 2] else [-100] * inside.sum()
            assert after.labels[inside].tolist() == list(labels)
            assert set(after.segments[inside]) == {segment if kept[sequence // 2] else -1}


def test_a_pair_that_is_longer_than_a_row_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(
        PreferenceDataError, match="a pair has 7 tokens, which does not fit into a sequence of 6"
    ):
        _open(_pairs(tmp_path / "p", [([1], [2, 3]), ([1], [2, 3, 4])]), length=6)


def test_log_probabilities_of_other_pairs_are_refused(tmp_path: Path) -> None:
    reference = _artifact(tmp_path / "r", {"log_probabilities": np.zeros(3, np.float32)})
    with pytest.raises(StoreError, match=r"3 log-probabilities.*2 sequences"):
        _open(_pairs(tmp_path / "p", _many(1)), reference)


class Trap:
    """Unpickling one writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_arrays_are_never_unpickled(tmp_path: Path) -> None:
    pairs = _pairs(tmp_path / "p", _many(1))
    (tmp_path / "p" / "rewards.npy").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match="pickled"):
        _open(pairs)
    assert not (tmp_path / "sprung").exists()


def test_completions_by_themselves_leave_the_places_of_another_side_empty(tmp_path: Path) -> None:
    """A row holds more of them than pairs, and an odd number of sequences is no damage."""
    sequences = _many(10)[:17]
    rewards = [index / 32 for index in range(17)]
    reference = _artifact(tmp_path / "r", {"log_probabilities": np.arange(17, dtype=np.float32)})
    pairs = _pairs(tmp_path / "p", sequences, rewards)
    samples = PreferenceSamples.open(pairs, reference, sequence_length=24, pad_id=PAD, sides=1)
    seen = []
    for row in range(samples.rows):
        sample, ids = samples.row(row), samples.sequence_ids(row)
        seen += ids.tolist()
        assert sample.present.tolist() == [n % 2 == 0 and n < 2 * len(ids) for n in range(samples.width)]
        for place, sequence in enumerate(ids.tolist()):
            assert sample.labels[sample.segments == 2 * place].tolist() == sequences[sequence][1]
            assert (sample.rewards[2 * place], sample.reference[2 * place]) == (rewards[sequence], sequence)
        assert not (sample.segments % 2 == 1).any() or set(sample.segments[sample.segments % 2 == 1]) == {-1}
    assert sorted(seen) == list(range(17))
    with pytest.raises(StoreError, match="do not belong together"):
        _open(pairs)
