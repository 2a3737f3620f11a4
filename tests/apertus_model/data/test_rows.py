from __future__ import annotations

from pathlib import Path

import pytest

from apertus_model.data import rows as rows_module
from apertus_model.data.rows import Rows, read_units, write_rows, write_unit
from apertus_model.work.units import CommittedUnit
from infra.store import Artifact, Attempt, Store, StoreError
from tests.jobs import job_at


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    store = Store.open(str(tmp_path / "store"))
    return Attempt(job_at("k/f", store, tmp_path))


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


def test_a_unit_holds_a_row_for_each_item_and_is_checked_when_it_is_read(attempt: Attempt) -> None:
    rows = [{"i": i, "text": "zwölf\n\u2028"} for i in range(3)]
    result = write_unit((4, 7), rows, attempt.workdir / "u.jsonl")
    attempt.commit_unit("u", files=result.files)
    stored = attempt.committed_unit("u")
    unit = CommittedUnit(attempt, "u")
    assert list(read_units([unit, unit])) == rows * 2
    with pytest.raises(AssertionError, match="3 rows for 2 items"):
        write_unit((4, 6), rows, attempt.workdir / "u.jsonl")
    Path(attempt.store.full(stored.files["rows.jsonl"].path)).write_text('{"i": 1}\n')
    with pytest.raises(StoreError, match="is damaged"):
        list(read_units([CommittedUnit(attempt, "u")]))
