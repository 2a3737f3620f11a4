from __future__ import annotations

from pathlib import Path

import pytest

from apertus_model.data import rows as rows_module
from apertus_model.data.rows import Rows, Units, spans, write_rows
from apertus_model.progress import Progress
from infra.store import Artifact, Attempt, Store, StoreError
from specs.job import Job


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    store = Store.open(str(tmp_path / "store"))
    fields = {
        "node": "n",
        "kind": "k",
        "version": 1,
        "fingerprint": "f",
        "spec": {},
        "identity": {},
        "inputs": {},
        "launch": {},
    }
    places = {
        "store": store.url,
        "path": "k/f",
        "attempt": "a",
        "scratch": str(tmp_path / "scratch"),
        "progress": "",
    }
    return Attempt(Job(**fields, **places))


def _written(attempt: Attempt, count: int) -> Rows:
    attempt.commit(
        metrics={},
        facts=write_rows(attempt, "things", ({"i": i, "text": "zwölf\n\u2028"} for i in range(count))),
    )
    return Rows(Artifact(attempt.store, "k/f"))


def test_rows_come_back_in_order_from_files_of_fixed_size(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "ROWS_PER_FILE", 4)
    rows = _written(attempt, 9)
    assert rows.artifact.manifest.facts == {
        "shards": ["things-00000", "things-00001", "things-00002"],
        "rows": 9,
    }
    assert [row["i"] for row in rows] == list(range(9))
    assert [row["i"] for row in rows[3:6]] == [3, 4, 5]
    assert rows[8] == {"i": 8, "text": "zwölf\n\u2028"}
    with pytest.raises(IndexError):
        rows[9]


def test_no_rows_make_no_files(attempt: Attempt) -> None:
    rows = _written(attempt, 0)
    assert (len(rows), list(rows), rows.artifact.manifest.files) == (0, [], {})


def test_spans_cover_everything_once() -> None:
    assert spans(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert spans(0, 4) == []


def test_a_unit_that_was_committed_is_not_computed_again(attempt: Attempt) -> None:
    computed: list[int] = []

    def rows_of(start: int, stop: int) -> list[dict[str, int]]:
        computed.extend(range(start, stop))
        return [{"i": i} for i in range(start, stop)]

    Units(attempt, "u", [(0, 2)]).compute(rows_of, Progress(None))
    units = Units(attempt, "u", [(0, 2), (2, 3)])
    units.compute(rows_of, Progress(None))
    assert computed == [0, 1, 2]
    assert [row["i"] for row in units.rows()] == [0, 1, 2]


def test_a_damaged_unit_is_found(attempt: Attempt) -> None:
    units = Units(attempt, "u", [(0, 1)])
    units.compute(lambda start, stop: [{"i": 0}], Progress(None))
    unit = attempt.unit("u-00000000-00000001")
    assert unit is not None
    Path(attempt.store.full(unit.files["rows.jsonl"].path)).write_text('{"i": 1}\n')
    with pytest.raises(StoreError, match="is damaged"):
        list(units.rows())
