"""`apertus verify`: what is damaged is named, down to the piece, with the stages to rerun; and nothing
else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.store import Artifact, Store
from infra.store.inputs import digest_of
from infra.store.maintenance.verify import verify, withdraw
from tests.infra.store.maintenance.verified import (
    CORPUS,
    DATA,
    OTHER,
    PIECE,
    TRAINED,
    attempt,
    change,
    stored,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return stored(tmp_path)


def files_below(store: Store) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(store.root).rglob("*") if path.is_file()}


def test_a_sound_store_is_read_whole_and_not_changed(store: Store) -> None:
    before = files_below(store)
    seen: list[tuple[int, int]] = []
    found = verify(store, on_progress=lambda done, total: seen.append((done, total)))
    assert found.damages == []
    assert found.rerun() == []
    rows = sum(len(data) for path, data in before.items() if "/history/" in path)
    size = 2 * (len(DATA) + len(b"unit")) + 10 + 20 + rows + len(b"weights")
    assert (found.files, found.bytes) == (9, size)
    assert found.markers == 2 + 2 * 2 + 3 + 1
    assert seen[0] == (0, size) and seen[-1] == (size, size)
    assert files_below(store) == before


@pytest.mark.parametrize("marked", [True, False])
def test_a_file_of_a_unit_that_was_used_up_is_not_missing(tmp_path: Path, marked: bool) -> None:
    store = Store.open(str(tmp_path / "store"))
    store.initialise()
    corpus = attempt(store, tmp_path, CORPUS)
    (tmp_path / "part").write_bytes(b"part")
    corpus.commit_unit("task", files={"used": tmp_path / "part", "unused": tmp_path / "part"})
    unit = corpus.committed_unit("task")
    if marked:
        corpus.remove_files(unit, ["used"])
    else:
        store.remove(unit.files["used"].path)
    found = verify(store)
    assert [damage.file for damage in found.damages] == [unit.files["used"].path] * (not marked)
    store.remove(unit.files["unused"].path)
    assert unit.files["unused"].path in {damage.file for damage in verify(store).damages}


def test_a_changed_byte_is_named_with_its_piece_and_the_stages_to_rerun(store: Store) -> None:
    change(store, f"{CORPUS}/attempts/first/a.bin", 5 * PIECE)
    change(store, f"{CORPUS}/attempts/first/a.bin", 20 * PIECE)
    found = verify(store)
    assert [(damage.file, damage.pieces, damage.markers) for damage in found.damages] == [
        (f"{CORPUS}/attempts/first/a.bin", (5, 20), (f"{CORPUS}/manifest.json",))
    ]
    assert [(part["name"], part["because"]) for part in found.rerun()] == [
        ("my-corpus-c1", "damaged"),
        ("my-pretrain-b1", "made from my-corpus-c1"),
        ("my-export-e1", "made from my-pretrain-b1"),
    ]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (f"{TRAINED}/attempts/first/step-00000020/w", "missing"),
        (f"{TRAINED}/checkpoints/00000020.json", "not JSON"),
        (f"{CORPUS}/units/task.json", "not JSON"),
        (f"{CORPUS}/attempts/first/units/task/unit.bin", "missing"),
        (f"{CORPUS}/attempts/first/.a.bin.pieces", "shorter"),
        (f"{CORPUS}/manifest.json", "not JSON"),
        (f"{CORPUS}/identity.json", "not JSON"),
        ("runs/mini/1.json", "not JSON"),
        ("inputs/1.json", "not JSON"),
    ],
)
def test_whatever_is_damaged_is_found_and_withdrawn(store: Store, path: str, problem: str) -> None:
    full = Path(store.full(path))
    if problem == "missing":
        full.unlink()
    else:
        full.write_bytes(full.read_bytes()[:-3])
    found = verify(store)
    assert len(found.damages) == 1
    assert path.rsplit("/", 1)[-1].removeprefix(".").removesuffix(".pieces") in found.damages[0].what
    gone = withdraw(store, found.damages)
    assert set(gone) == set(found.damages[0].markers)
    again = verify(store)
    assert [
        damage for damage in again.damages if damage.what == found.damages[0].what and "identity" not in path
    ] == []
    kept = [
        str(file).split("/damaged/", 1)[1].split("/", 1)[1]
        for file in Path(store.root, "damaged").rglob("*.json")
    ]
    assert sorted(kept) == gone


def test_the_record_of_the_files_of_a_source_is_sound_when_they_make_its_digest(store: Store) -> None:
    rows = [{"path": name, "size": 1, "sha256": name * 64} for name in "ab"]
    digest = digest_of((row["path"], row["sha256"]) for row in rows)
    path = f"inputs/{digest}.files.jsonl"
    store.write_once(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert verify(store).damages == []
    change(store, path, len('{"path": "'))
    [damage] = verify(store).damages
    assert damage.markers == (path,) and f"its files do not make the digest {digest}" in damage.what


def test_a_marker_whose_folder_leads_elsewhere_is_damaged_and_the_others_are_checked(
    store: Store, tmp_path: Path
) -> None:
    change(store, f"{CORPUS}/attempts/first/a.bin")
    path = f"{TRAINED}/checkpoints/00000010.json"
    store.replace(path, json.dumps(store.read_json(path) | {"folder": "../../x"}).encode())
    (tmp_path / "elsewhere").write_bytes(b"unit")
    linked = Path(store.full(f"{OTHER}/attempts/first/units/task/unit.bin"))
    linked.unlink()
    linked.symlink_to(tmp_path / "elsewhere")
    found = {damage.markers[0]: damage.what for damage in verify(store).damages}
    assert found.keys() == {path, f"{OTHER}/units/task.json", f"{CORPUS}/manifest.json"}
    assert "names '../../x', which is not a path inside the store" in found[path]
    assert "leads out of the store through a link" in found[f"{OTHER}/units/task.json"]


def test_withdrawing_takes_what_is_damaged_and_nothing_else(store: Store) -> None:
    change(store, f"{TRAINED}/attempts/first/step-00000020/w")
    assert withdraw(store, verify(store).damages) == [
        f"{TRAINED}/checkpoints/00000020.json",
        f"{TRAINED}/manifest-00000020.json",
    ]
    trained = Artifact(store, TRAINED)
    assert trained.checkpoint_steps() == [10]
    assert not Artifact(store, TRAINED, 20).complete
    assert Artifact(store, CORPUS).bytes("a.bin") == DATA
    assert verify(store).damages == []


def test_a_checkpoint_whose_rows_of_metrics_are_damaged_is_named_and_kept(store: Store) -> None:
    change(store, f"{TRAINED}/attempts/first/history/00000010.parquet")
    found = verify(store)
    assert [damage.history for damage in found.damages] == [True]
    assert (withdraw(store, found.damages), found.rerun()) == ([], [])
    assert Artifact(store, TRAINED).checkpoint_steps() == [10, 20]


def test_of_a_chosen_artifact_the_others_are_not_read(store: Store) -> None:
    change(store, f"{CORPUS}/attempts/first/a.bin")
    assert verify(store, [OTHER, TRAINED]).damages == []
    assert len(verify(store, [CORPUS]).damages) == 1
