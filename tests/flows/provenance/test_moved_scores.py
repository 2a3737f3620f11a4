"""Which scores another constitution moves, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apertus_model.data.rows import write_rows
from flows.provenance.moved_scores import Score, moved_scores
from infra.store import Artifact, Attempt
from specs.differences import Change
from tests.apertus_model.conftest import Bench
from tests.flows.finished import invoke, read_json

A, B, OTHER = "aaaaaa" + "0" * 26, "bbbbbb" + "0" * 26, "cccccc" + "0" * 26
BEFORE = [
    {"id": "p0", "offline": [5.0], "sampled": [2.0, 3.0]},
    {"id": "p1", "offline": [], "sampled": [4.0, 1.0]},
]
AFTER = [
    {"id": "p0", "offline": [1.0], "sampled": [2.0, 3.5]},
    {"id": "p1", "offline": [], "sampled": [4.0, 1.0]},
]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def put(
    bench: Bench,
    kind: str,
    fingerprint: str,
    rows: list[dict[str, Any]],
    inputs: dict[str, Artifact] | None = None,
    constitution: str | None = None,
) -> Artifact:
    attempt = Attempt(bench.job(kind, fingerprint, {}, inputs or {}))
    attempt.begin()
    if constitution is not None:
        attempt.write_bytes("constitution.txt", constitution.encode())
    attempt.commit(metrics={}, facts=write_rows(attempt, kind, rows))
    return Artifact(bench.store, f"{kind}/{fingerprint}")


@pytest.fixture
def read(bench: Bench) -> dict[str, Artifact]:
    prompts = [{"messages": [{"role": "user", "content": f"{'x' * 80} what is {n}?"}]} for n in range(2)]
    return {
        "prompts": put(bench, "prompts", OTHER, prompts),
        "completions": put(bench, "completions", OTHER, []),
    }


def test_scores_of_the_same_completions_are_compared(bench: Bench, read: dict[str, Artifact]) -> None:
    """Of p0, the offline completion falls from first to last: both of its pairs change their order."""
    first = put(bench, "rewards", A, BEFORE, read, "1. Be kind.\n2. Be brief.")
    second = put(bench, "rewards", B, AFTER, read, "1. Be kind.\n2. Be long.\n3. Cite.")
    found = moved_scores(first, second)
    assert found is not None
    assert (found.completions, found.moved, found.pairs, found.swapped) == (5, 2, 4, 2)
    assert found.mean == pytest.approx((-4 + 0.5) / 5)
    about = ("x" * 80 + " what is 0?")[-60:]
    assert found.largest == [Score(about, "offline 1", 5.0, 1.0), Score(about, "sampled 2", 3.0, 3.5)]
    assert found.clauses == [Change("2", "Be brief.", "Be long."), Change("3", None, "Cite.", "b")]


def test_the_command_shows_clauses_and_scores(bench: Bench, read: dict[str, Artifact]) -> None:
    put(bench, "rewards", A, BEFORE, read, "1. Be kind.\n2. Be brief.")
    put(bench, "rewards", B, AFTER, read, "1. Be kind.\n2. Be long.")
    command = ("diff", f"rewards/{A[:6]}", f"rewards/{B[:6]}", "--store", bench.store.url)
    shown = invoke(*command).output
    assert "clause 2 in A: Be brief." in shown and "clause 2 in B: Be long." in shown
    assert "2 of 5 scores move, by -0.7 in the mean; 2 of 4 pairs of completions change their order" in shown
    assert "offline 1" in shown
    [part] = read_json(*command, "--json")["parts"]
    assert (part["scores"]["moved"], part["scores"]["largest"][0]["completion"]) == (2, "offline 1")


def test_only_the_largest_are_listed(bench: Bench) -> None:
    pairs = [{"id": f"p{n}", "source": 0, "chosen": 0.0, "rejected": 1.0} for n in range(30)]
    other = [row | {"chosen": float(n)} for n, row in enumerate(pairs)] + [
        {"id": "x", "dropped": "without_label"}
    ]
    first = put(bench, "evaluate_reward", A, [*pairs, {"id": "x", "dropped": "without_label"}])
    found = moved_scores(first, put(bench, "evaluate_reward", B, other))
    assert found is not None
    assert [score.b for score in found.largest] == [float(n) for n in range(29, 19, -1)]
    assert (found.moved, found.completions, found.swapped) == (29, 60, 28)


def test_other_completions_are_not_compared(bench: Bench, read: dict[str, Artifact]) -> None:
    first = put(bench, "rewards", A, BEFORE, read)
    elsewhere = read | {"completions": put(bench, "completions", A, [])}
    assert moved_scores(first, put(bench, "rewards", B, AFTER, elsewhere)) is None
    generated = read | {"generated:0": elsewhere["completions"]}
    assert moved_scores(first, put(bench, "rewards", OTHER, AFTER, generated)) is None
    assert moved_scores(read["prompts"], read["prompts"]) is None
    pairs = [
        put(bench, "evaluate_reward", name, [{"id": name, "chosen": 1.0, "rejected": 2.0}]) for name in (A, B)
    ]
    assert moved_scores(*pairs) is None
