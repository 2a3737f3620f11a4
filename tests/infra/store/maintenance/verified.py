"""A store with a corpus, a training and an export, of which a byte can be changed."""

from __future__ import annotations

from pathlib import Path
from random import Random

from infra.store import Attempt, Store
from infra.store.documents import Lock, RunDocument
from specs.base import fingerprint
from tests.jobs import input_at, job_at

PIECE = 1024
DATA = Random(1).randbytes(20 * PIECE + 5)
NAMES: dict[str, str] = {}  # of the parts, by place


def place(name: str, *inputs: str) -> str:
    """The place of the part `my-<kind>-<letter>`."""
    kind = name.split("-")[1]
    made = fingerprint(kind, 1, {"name": name}, {f"input-{read}": read.split("/")[1] for read in inputs})
    NAMES[f"{kind}/{made}"] = name
    return f"{kind}/{made}"


CORPUS, OTHER = place("my-corpus-c1"), place("my-corpus-c2")
TRAINED = place("my-pretrain-b1", CORPUS)
EXPORT = place("my-export-e1", TRAINED)


def attempt(store: Store, folder: Path, path: str, *inputs: str, step: int | None = None) -> Attempt:
    refs = {f"input-{read}": input_at(read, name=read) for read in inputs}
    about = {"node": NAMES[path], "identity": {"name": NAMES[path]}, "inputs": refs, "resume_step": step}
    begun = Attempt(job_at(path, store, folder, **about), store)
    begun.begin()
    return begun


def stored(tmp_path: Path) -> Store:
    """A corpus with a unit, training on it with two checkpoints, an export of the second; and another
    corpus."""
    opened = Store.open(str(tmp_path / "store"))
    store = Store(opened.fs, opened.root, piece_bytes=PIECE)
    store.initialise()
    store.write_document("runs/mini/1.json", RunDocument(parts={}))
    store.write_document("inputs/1.json", Lock(digest="1"))
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
