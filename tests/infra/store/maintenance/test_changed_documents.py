"""One changed field, or one flipped bit, in any document of a store is noticed: by whoever reads it, and by
`verify`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infra.store import Store, StoreError, documents
from infra.store.documents import Foreign, Protected
from infra.store.inputs import ROWS, ListedFile, Listing, lock, recorded_files
from infra.store.maintenance.verify import verify, withdraw
from infra.store.reading.walk import ARTIFACT
from infra.store.runs import protected_mark
from infra.store.writing.retention import refer
from tests.infra.store.maintenance.verified import EXPORT, TRAINED, stored

MARK = protected_mark(TRAINED, 20)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with a document of every kind."""
    made = stored(tmp_path)
    refer(made, TRAINED, 20, EXPORT)
    listing = Listing("file:///x", (ListedFile("a.txt", 3, "1"), ListedFile("b.txt", 4, "2")))
    listing.__dict__["contents"] = {"a.txt": "a" * 64, "b.txt": "b" * 64}
    lock(made, listing, listing.digest())
    made.write_document(MARK, Protected(name="train", path=TRAINED, step=20))
    made.remove("something")
    return made


def kind(path: str) -> str:
    """The sort of document that lies there, as its model's docstring writes it: `checkpoints/<step>.json`."""
    inner = path.split("/", 2)[2] if ARTIFACT.match("/".join(path.split("/")[:2])) else path
    if inner.startswith("inputs/"):
        return "inputs/<digest>.files.jsonl" if path.endswith(ROWS) else "inputs/<key>.json"
    return re.split(r"[/.-]", inner)[0]


def places(store: Store) -> dict[str, str]:
    """The place of one document of each kind."""
    names = [str(path.relative_to(store.root)) for path in sorted(Path(store.root).rglob("*.json*"))]
    return {kind(name): name for name in names}


def test_the_store_of_these_tests_has_a_document_of_every_model(store: Store) -> None:
    models = [model for model in vars(documents).values() if isinstance(model, type)]
    names = [
        re.findall(r"`([^` ]+\.jsonl?)`", model.__doc__ or "")
        for model in models
        if issubclass(model, Foreign)
    ]
    assert {kind(name) for found in names for name in found} == places(store).keys()


def changes(value: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with one leaf changed, or one key renamed, or an item more or less."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield {key + "x" * (name == key): other for name, other in value.items()}
            yield from ({**value, key: changed} for changed in changes(item))
    elif isinstance(value, list):
        yield [*value, *value[-1:]] if value else [1]
        for at, item in enumerate(value):
            yield from ([*value[:at], changed, *value[at + 1 :]] for changed in changes(item))
    elif isinstance(value, bool) or value is None:
        yield not value
    elif isinstance(value, str):
        yield value[:-1] + chr(ord(value[-1:] or "a") ^ 1)
    else:
        yield value + 1


def contents(path: str, data: bytes) -> Iterator[bytes]:
    """The bytes of a document with each change in turn."""
    if path.endswith(ROWS):
        lines = [json.loads(line) for line in data.splitlines()]
        for changed in changes(lines):
            yield "".join(json.dumps(line) + "\n" for line in changed).encode()
    else:
        yield from (json.dumps(changed).encode() for changed in changes(json.loads(data)))


def noticed(store: Store) -> set[str]:
    """The documents that `verify` of a newly opened store names."""
    found = verify(Store(store.fs, store.root))
    return {marker for damage in found.damages for marker in damage.markers} | {*found.without_checksum}


def test_every_change_of_one_field_of_a_document_is_found_by_verify(store: Store) -> None:
    sound = {path: store.read_bytes(path) for path in places(store).values() if path != "format.json"}
    for round_ in zip_longest(*(contents(path, data) for path, data in sound.items())):
        changed = dict(zip(sound, round_, strict=True))
        for path, data in changed.items():
            Path(store.full(path)).write_bytes(data or sound[path])
        assert noticed(store) >= {path for path, data in changed.items() if data is not None}, changed


def read(store: Store, path: str) -> Any:
    """What a reader of the document gets."""
    if path.endswith(ROWS):
        return recorded_files(store, path.removeprefix("inputs/").removesuffix(ROWS))
    return Store.open(store.url).format() if path == "format.json" else store.read_json(path)


def test_a_flipped_bit_is_noticed_by_the_reader_of_the_document(store: Store) -> None:
    random = Random(7)
    for path in places(store).values():
        file, sound = Path(store.full(path)), read(store, path)
        data = file.read_bytes()
        for at in random.sample(range(8 * len(data)), min(8 * len(data), 40)):
            flipped = bytearray(data)
            flipped[at // 8] ^= 1 << at % 8
            file.write_bytes(flipped)
            store.without_checksum.clear()
            try:
                found = read(store, path)
                assert found == sound or path in store.without_checksum, (path, bytes(flipped))
            except StoreError as error:
                assert path in str(error) or "has format" in str(error)
        file.write_bytes(data)


def remove_checksums(store: Store) -> list[str]:
    """Takes the checksums away, as another program may write documents. Returns the sorted paths."""
    changed = []
    for path in sorted(str(path.relative_to(store.root)) for path in Path(store.root).rglob("*.json*")):
        if b"checksum" in (data := store.read_bytes(path)):
            changed.append(path)
            rows = [json.loads(row) for row in (data.splitlines() if path.endswith(ROWS) else [data])]
            rest = [{name: value for name, value in row.items() if name != "checksum"} for row in rows]
            Path(store.full(path)).write_text("\n".join(map(json.dumps, rest)))
    return changed


def test_documents_without_a_checksum_are_read_and_named(store: Store) -> None:
    changed = remove_checksums(store)
    assert {kind(path) for path in changed} == places(store).keys() - {"format"}
    found = verify(Store.open(store.url))
    assert (found.damages, found.without_checksum) == ([], changed)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"kind": "sft"},
        {"spec": {"name": "my-pretrain-b2"}},
        {"inputs": {}},
    ],
)
def test_what_was_hashed_must_make_the_fingerprint_even_without_a_checksum(
    store: Store, change: dict[str, Any]
) -> None:
    remove_checksums(store)
    path = f"{TRAINED}/identity.json"
    document = json.loads(store.read_bytes(path))
    Path(store.full(path)).write_text(json.dumps(document | change))
    [damage] = verify(store).damages
    assert damage.markers == (path, f"{TRAINED}/manifest-00000020.json")
    assert f"'{path}' in the store {store.url} is damaged: what it states is hashed to " in damage.what
    assert path not in verify(store).without_checksum


def test_a_checkpoint_counts_with_its_step_in_the_fingerprint_of_its_reader(tmp_path: Path) -> None:
    from specs.base import fingerprint

    made = {"kind": "export", "version": 1, "spec": {}, "name": "export"}
    digest = fingerprint("export", 1, {}, {"parent": f"{'a' * 32}@20", "source:0": "b" * 32})
    store, path = Store.open(str(tmp_path)), f"export/{digest}/identity.json"
    store.initialise()
    read = {"kind": "pretrain", "fingerprint": "a" * 32, "step": 20}
    inputs = {"parent": read, "source:0": {"kind": "external", "fingerprint": "b" * 32}}
    store.write_once(path, json.dumps({**made, "fingerprint": digest, "inputs": inputs}).encode())
    assert verify(store).damages == []
    inputs["parent"] = read | {"step": 30}
    store.replace(path, json.dumps({**made, "fingerprint": digest, "inputs": inputs}).encode())
    assert [damage.markers for damage in verify(store).damages] == [(path,)]


def test_a_damaged_mark_of_a_protected_stage_is_named_and_never_withdrawn(store: Store) -> None:
    file = Path(store.full(MARK))
    file.write_text(file.read_text().replace('"train"', '"drain"'))
    found = verify(store)
    assert "delete it, then repeat `apertus run`" in found.damages[0].what
    assert (noticed(store), withdraw(store, found.damages), store.exists(MARK)) == ({MARK}, [], True)


def test_the_size_of_a_listed_file_cannot_change_unnoticed(store: Store) -> None:
    path = places(store)["inputs/<digest>.files.jsonl"]
    file = Path(store.full(path))
    file.write_text(file.read_text().replace('"size": 3', '"size": 8'))
    with pytest.raises(StoreError, match=rf"'{path}' .* does not match its checksum"):
        recorded_files(store, path.removeprefix("inputs/").removesuffix(ROWS))
