"""Examples of dropped and kept documents."""

from __future__ import annotations

from random import Random

from apertus_model.data.corpora.examples import CANDIDATES, Examples, Row, choose, mixed


def test_the_examples_are_the_smallest_of_all_and_each_text_once() -> None:
    rows: dict[int, Row] = {}
    tasks = []
    random = Random(5)
    for _ in range(6):
        examples = Examples()
        for _ in range(40):
            hash_ = random.choice([random.getrandbits(64), random.choice([*rows, 1])])
            rows[hash_] = {"text": f"text {hash_}"}
            examples.offer("kept", (hash_, 0), rows[hash_].copy)
        tasks.append(examples.rows())
    smallest = sorted(rows, key=mixed)

    def among(gone: set[int]) -> list[Row]:
        return [{**row, "alive": int(row["hash"], 16) not in gone} for task in tasks for row in task]

    assert [row["text"] for row in choose(among(set()), ["kept"])] == [f"text {h}" for h in smallest[:3]]
    chosen = choose(among(set(smallest[1 : CANDIDATES - 1])), ["kept"])
    assert [row["hash"] for row in chosen] == [f"{h:016x}" for h in (smallest[0], smallest[CANDIDATES - 1])]
