"""`apertus verify`: what is damaged is named, down to the piece, with the stages to rerun; and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.__main__ import app
from infra.store import Artifact, Attempt, Store
from infra.store.inputs import digest_of
from infra.store.maintenance.verify import verify, withdraw
from specs.job import InputRef, Job

PIECE = 1024
DATA = Random(1).randbytes(20 * PIECE + 5)
CORPUS, TRAINED, EXPORT, OTHER = f"corpus/{'c1' * 16}", f"pretrain/{'b1' * 16}", f"export/{'e1' * 16}", f"corpus/{'c2' * 16}"


def attempt(store: Store, folder: Path, path: str, *inputs: str, step: int | None = None) -> Attempt:
    kind, _, fingerprint = path.partition("/")
    refs = {f"input-{read}": InputRef(kind=read.split("/")[0], fingerprint="0", name=read, path=read) for read in inputs}
    job = Job(
        node=f"my-{kind}-{fingerprint[:2]}", kind=kind, version=1, fingerprint=fingerprint, spec={}, identity={}, inputs=refs, launch={},
        store=store.url, path=path, attempt="first", scratch=str(folder / "scratch" / path), progress=str(folder / "progress"),
        resume_step=step,
    )  # fmt: skip
    made = Attempt(job, store)
    made.begin()
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A corpus with a unit, training on it with two checkpoints, an export of the second; and another corpus."""
    opened = Store.open(str(tmp_path / "store"))
    store = Store(opened.fs, opened.root, piece_bytes=PIECE)
    store.initialise()
    store.write_once("runs/mini/1.json", b'{"parts": {}}')
    store.write_once("inputs/1.json", b'{"digest": "1"}')
    store.write_once("something/else/note.json", b"no artifact")
    for path in (CORPUS, OTHER):
        corpus = attempt(store, tmp_path, path)
        (tmp_path / "unit").write_bytes(b"unit")
        corpus.commit_unit("task", files={"unit.bin": tmp_path / "unit"})
        corpus.write_bytes("a.bin", DATA)
        corpus.commit(metrics={})
    training = attempt(store, tmp_path, TRAINED, CORPUS)
    for step in (10, 20):
        with store.writer(training.folder(f"step-{step:08d}/w")) as writer:
            writer.write(DATA[:step])
        training.add_metrics({"step": step})
        training.commit_checkpoint(step, {}, files={"w": writer.record})
    training.commit(metrics={}, step=20)
    export = attempt(store, tmp_path, EXPORT, TRAINED)
    export.write_bytes("model.safetensors", b"weights")
    export.commit(metrics={})
    return store


def change(store: Store, path: str, offset: int = 0) -> None:
    full = Path(store.full(path))
    data = bytearray(full.read_bytes())
    data[offset] ^= 1
    full.write_bytes(data)


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
    ("path", "said"),
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
def test_whatever_is_damaged_is_found_and_withdrawn(store: Store, path: str, said: str) -> None:
    full = Path(store.full(path))
    if said == "missing":
        full.unlink()
    else:
        full.write_bytes(full.read_bytes()[:-3])
    found = verify(store)
    assert len(found.damages) == 1
    assert path.rsplit("/", 1)[-1].removeprefix(".").removesuffix(".pieces") in found.damages[0].what
    gone = withdraw(store, found.damages)
    assert set(gone) == set(found.damages[0].markers)
    again = verify(store)
    assert [damage for damage in again.damages if damage.what == found.damages[0].what and "identity" not in path] == []
    kept = [str(file).split("/damaged/", 1)[1].split("/", 1)[1] for file in Path(store.root, "damaged").rglob("*.json")]
    assert sorted(kept) == gone


def test_the_record_of_the_files_of_a_source_is_sound_when_they_make_its_digest(store: Store) -> None:
    rows = [{"path": name, "size": 1, "sha256": name * 64} for name in "ab"]
    digest = digest_of((row["path"], row["sha256"]) for row in rows)
    path = f"inputs/{digest}.files.jsonl"
    store.write_once(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert verify(store).damages == []
    change(store, path, 12)
    [damage] = verify(store).damages
    assert damage.markers == (path,) and f"its files do not make the digest {digest}" in damage.what


def test_a_marker_whose_folder_leads_elsewhere_is_damaged_and_the_others_are_checked(store: Store, tmp_path: Path) -> None:
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
    assert withdraw(store, verify(store).damages) == [f"{TRAINED}/checkpoints/00000020.json", f"{TRAINED}/manifest-00000020.json"]
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


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_ends_with_one_when_something_is_damaged_and_fixes_when_told(store: Store) -> None:
    assert command("--all", "--store", store.url)[0] == 0
    change(store, f"{CORPUS}/attempts/first/a.bin")
    code, output = command("--all", "--store", store.url)
    assert code == 1
    assert f"damaged: my-corpus-c1: '{CORPUS}/attempts/first/a.bin' is damaged: piece 0 of 21 (bytes 0 to 1024)" in output
    assert "to rerun: my-corpus-c1 (damaged)" in output
    assert "kept: my-export-e1 (made from my-pretrain-b1)" in output
    assert Artifact(store, CORPUS).complete
    code, output = command("--all", "--fix", "--json", "--store", store.url)
    document: dict[str, Any] = json.loads(output)
    assert (code, document["withdrawn"]) == (1, [f"{CORPUS}/manifest.json"])
    assert document["damaged"][0]["pieces"] == [0]
    names = {what: [part["name"] for part in document[what]] for what in ("rerun", "kept")}
    assert names == {"rerun": ["my-corpus-c1"], "kept": ["my-pretrain-b1", "my-export-e1"]}
    assert not Artifact(store, CORPUS).complete
    assert command("--all", "--store", store.url)[0] == 0


def test_the_command_wants_a_recipe_or_all_of_a_store_that_is_there(tmp_path: Path) -> None:
    assert command()[0] == 2
    assert command("--all", "--store", str(tmp_path / "none"))[0] == 2
