from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apertus_model.data.megatron import TokenFile, TokenFileWriter
from apertus_model.data.merge import Documents, Probe, SplitWriter, choose_probes
from infra.store.inputs import SourceError
from specs.stages.corpus import Repeats

EOS = 2


def _documents(folder: Path, *tasks: list[list[int]]) -> Documents:
    pairs = []
    for number, task in enumerate(tasks):
        with TokenFileWriter(folder / f"task-{number}", "<u2") as writer:
            for tokens in task:
                writer.write([1, *tokens, EOS])
        hashes = np.array([hash(tuple(tokens)) % 2**64 for tokens in task], dtype=np.uint64)
        pairs.append((TokenFile(folder / f"task-{number}"), hashes, np.ones(len(hashes), bool)))
    return Documents.open(pairs)


def _read(folder: Path, shards: list[str]) -> list[list[int]]:
    files = [TokenFile(folder / shard) for shard in shards]
    return [file[i].tolist() for file in files for i in range(len(file))]


def test_the_order_of_documents_does_not_depend_on_the_tasks(tmp_path: Path) -> None:
    texts = [[10 + i, 20 + i] for i in range(20)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, other = (
        _documents(tmp_path / "a", texts),
        _documents(tmp_path / "b", texts[13:], [], texts[4:13], texts[:4]),
    )
    assert [one.tokens(i).tolist() for i in range(20)] == [other.tokens(i).tolist() for i in range(20)]


def test_shards_hold_what_one_file_would(tmp_path: Path) -> None:
    documents = _documents(tmp_path, [[10 + i] * (i % 5 + 1) for i in range(50)])
    everything = np.arange(50)
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    one = SplitWriter(tmp_path / "one", 512, seed=3).write("train", documents, everything)
    many = SplitWriter(tmp_path / "many", 512, seed=3, shard_tokens=40).write("train", documents, everything)
    assert one.shards == ["train-00000"]
    assert many.shards == [f"train-{n:05d}" for n in range(len(many.shards))]
    assert len(many.shards) > 4
    assert _read(tmp_path / "one", one.shards) == _read(tmp_path / "many", many.shards)
    assert (one.documents, one.tokens) == (many.documents, many.tokens) == (50, int(documents.sizes.sum()))


def test_copies_of_a_probe_are_spread_over_the_split(tmp_path: Path) -> None:
    documents = _documents(tmp_path, [[100 + i] for i in range(200)])
    probe = Probe(document=0, bucket=8, token_ids=np.array([1, 7, 7], dtype="<u2"))
    split = SplitWriter(tmp_path, 512, seed=3).write("train", documents, np.arange(1, 200), [probe], EOS)
    written = _read(tmp_path, split.shards)
    places = [place for place, tokens in enumerate(written) if tokens == [1, 7, 7, EOS]]
    assert len(places) == 8
    assert len(written) == 207 == split.documents
    assert max(places) - min(places) > 50


def test_documents_with_equal_beginnings_are_not_probes(tmp_path: Path) -> None:
    licensed = [[50, 51, 52, 53, 54, 100 + i, 7, 7, 7, 7] for i in range(10)]
    others = [[200 + i, 51, 52, 53, 54, 55, 7, 7, 7, 7] for i in range(4)]
    documents = _documents(tmp_path, licensed + others)
    probes = choose_probes(documents, np.arange(14), Repeats(buckets=[0, 3], per_bucket=2, length=10), seed=1)
    assert sorted(int(probe.token_ids[1]) for probe in probes) == [200, 201, 202, 203]
    assert [probe.bucket for probe in probes] == [0, 0, 3, 3]
    with pytest.raises(SourceError, match=r"need 6 training documents .* there are 4"):
        choose_probes(documents, np.arange(14), Repeats(buckets=[0, 3], per_bucket=3, length=10), seed=1)


def test_a_single_document_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="1 documents are left after filtering"):
        _documents(tmp_path, [[5]]).held_out(0.5)


def test_a_share_that_holds_out_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds out all 2 documents"):
        _documents(tmp_path, [[5], [6]]).held_out(1.0)
