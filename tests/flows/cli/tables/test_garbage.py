"""What `apertus gc` lists."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.cli.tables.garbage import garbage_json, seconds_of, show_garbage
from infra.store import Store, StoreError
from infra.store.maintenance.garbage import GarbageItem, Survey

ITEMS = [
    GarbageItem(
        "pretrain/a", "pretrain", "pretrain/1", "no run reaches it", markers=["m"], files=["x"], bytes=5
    ),
    GarbageItem("pretrain/b", "pretrain", "pretrain/2", "no run reaches it", files=["x", "y"], bytes=7),
    GarbageItem("export/c", "export", "", "no run reaches it", markers=["m"], bytes=40),
    GarbageItem("pretrain/a", "pretrain", "pretrain/1", "units of a finished part", files=["z"], bytes=1),
]
SURVEY = Survey(ITEMS, 100, 9, 1, ["mini"], [], ["a note"], frozenset())


def test_items_are_summed_by_kind_stage_and_reason_largest_first(store: Store) -> None:
    output = io.StringIO()
    show_garbage(Console(file=output, width=120), store, SURVEY, "2d", removing=False)
    rows = [line.split() for line in output.getvalue().splitlines()]
    reason = ["no", "run", "reaches", "it"]
    first = rows.index(["export", "c", *reason, "1", "1", "40B"])
    assert rows[first + 1 : first + 3] == [
        ["pretrain", "pretrain", *reason, "2", "4", "12B"],
        ["pretrain", "pretrain", *["units", "of", "a", "finished", "part"], "1", "1", "1B"],
    ]
    assert ["in", "all", "6", "53B"] in rows


def test_json_has_every_item_with_its_numbers(store: Store) -> None:
    found = garbage_json(store, SURVEY)
    assert (found["bytes"], found["freed_bytes"], found["runs"], found["notes"]) == (
        100,
        53,
        ["mini"],
        ["a note"],
    )
    assert [(item["path"], item["files"]) for item in found["items"]] == [
        ("pretrain/a", 2),
        ("pretrain/b", 2),
        ("export/c", 1),
        ("pretrain/a", 1),
    ]


@pytest.mark.parametrize(("text", "seconds"), [("0s", 0.0), ("90min", 5400.0), ("2d", 172_800.0)])
def test_a_grace_period_is_a_duration(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_a_grace_period_that_is_none_names_the_option() -> None:
    with pytest.raises(StoreError, match="--grace: 'soon' is not a duration"):
        seconds_of("soon")
