"""The JSON documents of a store: their bytes, which other programs and older runs have written, and what is
refused."""

from __future__ import annotations

import hashlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.store import Attempt, DamagedError, Store, runs
from infra.store.documents import (
    CheckpointMarker,
    Manifest,
    MetricsRow,
    Seconds,
    Unit,
    check,
    to_json,
    with_checksum,
)
from infra.store.files.rows import decode, encode
from infra.store.inputs import ListedFile, Listing, lock
from infra.store.writing import attempt
from infra.store.writing.lease import Holder, Lease, Timing
from infra.store.writing.retention import refer
from specs.foreign import ForeignError, checked
from specs.job import InputRef
from tests.jobs import job_at

EXPECTED = Path(__file__).with_name("stored_documents.txt")
CORPUS, TRAINED = f"corpus/{'a' * 32}", f"pretrain/{'b' * 32}"
SPEC = {"seed": 1, "source": {"url": "file:///x"}}
IDENTITY = {"seed": 1, "rate": 1, "deep": {"b": [1, None], "a": 2.0}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store"))
    opened.piece_bytes = 4
    opened.initialise()
    return opened


class Timed(Attempt):
    def seconds(self) -> Seconds:
        return Seconds(startup=0.25, compute=1.0, storage=0.0)


def begun(store: Store, folder: Path, path: str, name: str, inputs: dict[str, InputRef]) -> Attempt:
    kind, fingerprint = path.split("/")
    launch = {"processes": None, "threads": 2}
    about = {"node": f"{kind}-{fingerprint[0]}", "version": 3, "spec": SPEC, "identity": IDENTITY}
    begun = Timed(job_at(path, store, folder, name, **about, launch=launch, inputs=inputs), store)
    begun.begin()
    return begun


def write_one_of_each(store: Store, folder: Path) -> None:
    corpus = begun(
        store,
        folder,
        CORPUS,
        "one",
        {"source:0": InputRef(kind="external", fingerprint="d" * 32, name="notes")},
    )
    (folder / "unit").write_bytes(b"unit")
    corpus.commit_unit("task-0", files={"t.bin": folder / "unit"}, data={"documents": 3, "x": None})
    corpus.commit_unit("empty")
    for name, data in {
        "short.bin": b"abc",
        "long.bin": b"abcdefghij",
        "longer.bin": bytes(range(50)),
    }.items():
        corpus.write_bytes(name, data)
    metrics = {"documents": 3, "train": {"tokens": 10, "other": None}, "ratio": 1, "share": 0.5}
    corpus.commit(metrics=metrics, facts={"train": ["train"]})
    read = InputRef(kind="corpus", fingerprint="a" * 32, name="corpus-a", path=CORPUS)
    training = begun(store, folder, TRAINED, "two", {"mixture": read})
    with store.writer(training.folder("step-00000010/w")) as writer:
        writer.write(b"weights")
    facts = {
        "tokens": 100,
        "passes": {"aa": 1, "bb": 0.5},
        "validation": {},
        "validation_step": None,
        "loss": 2.5,
    }
    training.commit_checkpoint(10, facts, files={"w": writer.record})
    training.commit(metrics={"loss": 2.5, "none": None}, facts={}, step=10)
    refer(store, TRAINED, 10, f"pretrain/{'c' * 32}")
    listing = Listing("file:///x", (ListedFile("a.txt", 3, "1"), ListedFile("b.txt", 4, "2")))
    listing.__dict__["contents"] = {"a.txt": "a" * 64, "b.txt": "b" * 64}
    lock(store, listing, "d" * 32)
    runs.write(store, "mini", {"c": (CORPUS, None), "t/1": (TRAINED, 10)}, {"name": "mini", "x": 1})
    here = {
        "host": "here",
        "boot": "b",
        "namespace": "pid:[1]",
        "started": 5,
        "since": "2026-01-01T00:00:00+00:00",
    }
    holder = Holder(attempt="one", pid=7, seconds=60.0, **here)  # type: ignore[arg-type]  # of several types
    store.write_once(f"{CORPUS}/leases/00000001.json", to_json(holder))
    lease = Lease(store, CORPUS, 1, holder, Timing(seconds=60))
    lease.stage_started(77)
    lease.beat()
    lease.release()


def test_every_document_is_stored_as_the_same_bytes_as_ever(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_now", lambda: "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(attempt, "_versions", lambda: {"python": "3.12.0", "numpy": "2.4.0"})
    write_one_of_each(store, tmp_path)
    documents = [
        path for path in sorted(Path(store.root).rglob("*")) if path.suffix in (".json", ".jsonl", ".beat")
    ]
    found = "".join(f"{path.relative_to(store.root)}\n{path.read_text()}" for path in documents)
    stamp = runs.stamps(store, "mini")[0]
    assert found.replace(stamp, "TIME") == EXPECTED.read_text()


def test_what_is_read_is_written_again_as_it_was(store: Store, tmp_path: Path) -> None:
    write_one_of_each(store, tmp_path)
    for path, model in {
        f"{CORPUS}/manifest.json": Manifest,
        f"{CORPUS}/units/task-0.json": Unit,
        f"{TRAINED}/manifest-00000010.json": Manifest,
        f"{TRAINED}/checkpoints/00000010.json": CheckpointMarker,
    }.items():
        assert with_checksum(to_json(check(model, store.read_json(path), path))) == store.read_bytes(path)


def test_the_checksum_is_the_digest_of_the_rest_as_the_page_on_formats_says(
    store: Store, tmp_path: Path
) -> None:
    write_one_of_each(store, tmp_path)
    for file in (path for path in Path(store.root).rglob("*.json*") if "leases" not in path.parts):
        texts = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        for document in map(json.loads, texts):
            if file.name == "format.json":
                assert document == {"format": 3}
                continue
            stated = document.pop("checksum")
            rest = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
            assert stated == hashlib.sha256(rest.encode()).hexdigest()


def test_a_document_with_keys_that_are_numbers_is_read_again(store: Store) -> None:
    stored = Unit(attempt="a", data={"n": {10: 1e-5, 9: -0.0}, "é": [2**70, 1.0, True, None]}, files={})
    store.write_document("unit.json", stored)
    again = store.read_json("unit.json")
    assert again["data"] == {"n": {"10": 1e-5, "9": -0.0}, "é": [2**70, 1.0, True, None]}
    assert store.without_checksum == set()


MARKER: dict[str, Any] = {
    **{"step": 10, "attempt": "a", "folder": "step-00000010", "facts": {}},
    **{
        "seconds": {"startup": 0.0, "compute": 1.0, "storage": 0.0},
        "files": {"w": {"size": 1, "sha256": "0" * 64}},
    },
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"facts": {"passes": {"aa": "many"}}}, r"facts\.passes\.aa is 'many'"),
        ({"facts": {"validation_step": -1}}, r"facts\.validation_step is -1"),
        ({"files": {"w": {"size": 1, "sha256": "xyz"}}}, r"files\.w\.sha256 is 'xyz'"),
        ({"files": {"w": {"size": True, "sha256": "0" * 64}}}, r"files\.w\.size is true"),
        (
            {"files": {"w": {"size": 9, "sha256": "0" * 64, "piece_bytes": 4, "pieces": ["0" * 64]}}},
            "the file has 3 pieces",
        ),
        (
            {"files": {"w": {"size": 9, "sha256": "0" * 64, "pieces": "0" * 64}}},
            "not their length, piece_bytes",
        ),
        (
            {"files": {"../w": {"size": 1, "sha256": "0" * 64}}},
            "names '../w', which is not a path inside the store",
        ),
        ({"folder": "/etc"}, "names '/etc', which is not a path inside the store"),
        ({"attempt": "a/b"}, "a single name is expected"),
        ({"seconds": None}, "seconds is null"),
    ],
)
def test_a_document_with_another_content_is_damaged_and_the_field_is_named(
    change: dict[str, Any], message: str
) -> None:
    assert check(CheckpointMarker, MARKER, "'m'").step == 10
    with pytest.raises(DamagedError, match=rf"^'m' is damaged: .*{message}"):
        check(CheckpointMarker, MARKER | change, "'m'")


@pytest.mark.parametrize(
    "row",
    [{"step": 1}, {"step": 1, "loss": math.inf, "masked_share": 0.5}, {"step": 2, "validation": {"web": 2}}],
)
def test_a_row_of_metrics_may_have_more_fields_than_are_known(row: dict[str, Any]) -> None:
    assert checked(MetricsRow, row).step == row["step"]
    assert decode(encode([row]), "rows.parquet") == [row]


@pytest.mark.parametrize(
    "row", [{"loss": 1.0}, {"step": "1"}, {"step": 1, "loss": "low"}, {"step": 1, "validation": {"web": "x"}}]
)
def test_a_row_of_metrics_of_other_types_is_neither_written_nor_read(row: dict[str, Any]) -> None:
    with pytest.raises(ForeignError):
        encode([row])
    stored = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row]), stored)
    with pytest.raises(DamagedError, match=r"'rows\.parquet' is damaged"):
        decode(stored.getvalue(), "rows.parquet")
