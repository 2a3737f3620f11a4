"""Records of runs: the last one is the one that was written last."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

from infra.store import Store, runs
from infra.store.documents import RunEnd

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_a_later_record_sorts_after_one_of_a_clock_that_is_ahead() -> None:
    store = Store.open(f"memory://{uuid.uuid4().hex}")
    times = []
    for now in (NOON, NOON - timedelta(hours=1), NOON - timedelta(days=1), NOON + timedelta(hours=1)):
        stamp = runs.next_stamp(store, "one", now)
        store.write_once(f"runs/one/{stamp}.json", b'{"parts": {}}')
        assert runs.last(store, "one").stamp == stamp
        times.append(stamp.split("-")[0])
    assert times == [
        "20260101T120000.000000Z",
        "20260101T120000.000001Z",
        "20260101T120000.000002Z",
        "20260101T130000.000000Z",
    ]


def test_a_record_of_another_name_does_not_hinder_a_new_one() -> None:
    store = Store.open(f"memory://{uuid.uuid4().hex}")
    store.write_once("runs/one/1.json", b'{"parts": {}}')
    assert runs.next_stamp(store, "one", NOON).startswith("20260101T120000.000000Z-")


def test_the_end_of_a_run_is_in_the_record_that_says_so_and_in_no_earlier_one() -> None:
    store = Store.open(f"memory://{uuid.uuid4().hex}")
    parts = {"export": ("export/aa", None)}
    end = RunEnd(outcome="failed", reason="export: no", started="2026-01-01T12:00:00+00:00", seconds=1.5)
    runs.write(store, "one", parts, {})
    assert runs.last(store, "one").end is None
    assert b'"end"' not in store.read_bytes(runs.last(store, "one").path)
    runs.write(store, "one", parts, {}, end)
    assert (runs.last(store, "one").end, runs.last(store, "one").parts) == (end, parts)
