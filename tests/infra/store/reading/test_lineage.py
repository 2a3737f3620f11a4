"""Where a part begins in its lineage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.store import Store
from infra.store.reading import lineage as lineages


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store"))
    opened.initialise()
    return opened


def test_a_part_begins_where_its_lineage_had_come_to(store: Store) -> None:
    def part(letter: str, spec: dict[str, int], *parents: tuple[str, int]) -> str:
        role = "parent" if len(parents) == 1 else "checkpoint:"
        inputs = {
            f"{role}{index if len(parents) > 1 else ''}": {
                "kind": "pretrain",
                "fingerprint": path.split("/")[1],
                "step": step,
            }
            for index, (path, step) in enumerate(parents)
        }
        identity = {
            "kind": "pretrain",
            "version": 1,
            "fingerprint": letter * 32,
            "name": letter,
            "spec": spec,
            "inputs": inputs,
        }
        store.write_once(f"pretrain/{letter * 32}/identity.json", json.dumps(identity).encode())
        return f"pretrain/{letter * 32}"

    first = part("a", {"global_batch_size": 4, "sequence_length": 32})
    second = part(
        "b",
        {"global_batch_size": 8, "sequence_length": 32, "start_step": 20, "start_tokens": 2560},
        (first, 20),
    )
    branched = part("c", {"global_batch_size": 8, "sequence_length": 32}, (first, 20))
    merged = part("d", {}, (second, 30), (branched, 5))
    last = part("e", {"global_batch_size": 1, "sequence_length": 64}, (merged, 1))
    before = {path: lineages.tokens_before(store, path) for path in (first, second, branched, merged, last)}
    assert list(before.values()) == [0, 20 * 128, 20 * 128, 20 * 128 + 10 * 256, 20 * 128 + 10 * 256]
