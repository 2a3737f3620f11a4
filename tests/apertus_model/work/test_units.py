from __future__ import annotations

from typing import Any

import pytest

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.work import Result, Work, run_units
from apertus_model.work.units import commit_result, open_work, spans, units_of
from infra.store import Attempt, Store
from tests.apertus_model.corpora import corpus_spec


class Squares:
    """Unit `n` has a file and data with its square."""

    def __init__(self, attempt: Attempt, keys: list[str]) -> None:
        self.units, self.computed, self._folder = keys, list[str](), attempt.workdir

    def run(self, key: str) -> Result:
        self.computed.append(key)
        path = self._folder / key
        path.write_text(str(int(key) ** 2))
        return Result({"square": path}, int(key) ** 2)


@pytest.fixture
def attempt(bench: Any) -> Attempt:
    return Attempt(bench.job("rewards", "s", {"reward": {"model": None}}))


def test_spans_cover_everything_once() -> None:
    assert spans(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert spans(0, 4) == []
    assert units_of("u", 3, 2) == {"u-00000000-00000002": (0, 2), "u-00000002-00000003": (2, 3)}


def test_a_unit_that_was_committed_is_not_computed_again(attempt: Attempt) -> None:
    stop, progress = StopSignal(), Progress(None)
    first, second = Squares(attempt, ["2", "3"]), Squares(attempt, ["1", "2", "3"])
    run_units(first, attempt, stop, progress)
    units = run_units(second, attempt, stop, progress)
    assert (first.computed, second.computed) == (["2", "3"], ["1"])
    assert [unit.data for unit in units] == [1, 4, 9]  # in the order of the keys
    assert [unit.files["square"].read_text() for unit in units] == ["1", "4", "9"]


def test_of_two_who_commit_a_unit_the_first_one_wins_and_no_file_is_written_twice(attempt: Attempt) -> None:
    other = Attempt(attempt.job, worker="w")
    commit_result(Squares(attempt, ["2"]), "2", attempt)
    one = attempt.committed_unit("2")
    commit_result(Squares(other, ["2"]), "2", other)
    assert other.committed_unit("2") == one
    assert sorted(attempt.store.names(attempt.folder("units/2"))) == ["square", "w"]
    assert not (attempt.workdir / "2").exists()


def test_a_unit_may_be_used_and_removed_as_soon_as_it_is_committed(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_once = Store.write_once

    def used_at_once(store: Store, path: str, data: bytes) -> bool:
        won = write_once(store, path, data)
        store.remove(path)
        return won

    monkeypatch.setattr(Store, "write_once", used_at_once)
    commit_result(Squares(attempt, ["2"]), "2", attempt)
    assert attempt.unit("2") is None


def test_a_worker_opens_the_work_of_a_stage_by_its_kind(bench: Any, documents: Any, tokenizer: Any) -> None:
    job = bench.job("corpus", "c", corpus_spec(documents), {"tokenizer": tokenizer}, attempt="a", workers=1)
    work: Work = open_work(Attempt(job))
    assert len(work.units) == 9  # of 7 files each
