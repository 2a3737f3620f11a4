"""The tables of `apertus diff`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from flows.cli.tables.diff import show
from flows.planning.plan import Plan
from flows.provenance.diff import compare, side


def printed(a: str, b: str, store: str) -> str:
    sides = side(a, store), side(b, store)
    output = io.StringIO()
    show(Console(file=output, width=120), *sides, compare(*sides))
    return output.getvalue()


def test_parts_that_differ_alike_share_a_table_and_equal_ones_are_counted(done: Plan, recipe: Path) -> None:
    other = recipe.with_name("other.yaml")
    other.write_text(
        "extends: tiny.yaml\n"
        "stages: {cooldown: {optimizer: {lr: 2e-4}, micro_batch_size: 2}, pretrain: {micro_batch_size: 1}}\n"
    )
    text = printed(str(recipe), str(other), done.store.url)
    assert "same 4 of 10 parts" in text
    alike = (
        "3 parts same fingerprint: the same result, run in another way: pretrain/1, pretrain/2, pretrain/3"
    )
    assert alike in " ".join(text.split())
    (row,) = [line.split() for line in text.splitlines() if "optimizer.lr" in line]
    assert row == ["identity", "optimizer.lr", "0.01", "0.0002", "-0.0098"]


def test_published_scores_have_a_table(done: Plan, recipe: Path) -> None:
    other = recipe.with_name("other.yaml")
    other.write_text(
        "extends: tiny.yaml\n"
        "stages: {evaluate: {reference: {perplexity: {value: 8, unit: metric, source: them}}}}\n"
    )
    text = printed(str(other), str(recipe), done.store.url)
    (row,) = [line.split() for line in text.splitlines() if "them" in line]
    assert row == ["evaluate", "A,", "B", "perplexity", "10", "8", "+2", "-", "them"]


def test_equal_recipes_differ_in_nothing(done: Plan, recipe: Path) -> None:
    assert "nothing differs" in printed(str(recipe), str(recipe), done.store.url)
