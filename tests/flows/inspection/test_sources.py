"""The first file of a source in rows is looked at by a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from flows.inspection.sources import check_sources
from flows.planning.plan import make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from tests.flows.conftest import finish
from tests.recipes import write_recipe

ROW = {"body": "a text " * 20_000, "url": "u", "length": 6}
THERE = "there are body, length, url"


@pytest.fixture(params=["jsonl", "parquet"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Overrides that make the tiny recipe's source one of rows with the columns of `ROW`."""
    folder, format_ = tmp_path / "rows", request.param
    folder.mkdir()
    (folder / "b.jsonl").write_text(json.dumps(ROW) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), folder / "b.parquet")
    return [f'sources.notes={{url: "{folder}", format: {format_}, include: ["*.{format_}"]}}']


@pytest.mark.parametrize(
    ("field", "stated", "message"),
    [
        ("text_column", "text", f"no column 'text'; {THERE}"),
        ("id_column", "key", f"no column 'key'; {THERE}"),
        ("metadata", "[url, date]", f"no column 'date'; {THERE}"),
    ],
)
def test_a_column_that_the_first_file_lacks_is_an_error_of_the_plan_at_its_field(
    tmp_path: Path, store: Store, rows: list[str], field: str, stated: str, message: str
) -> None:
    columns = {"text_column": "body", field: stated}
    overrides = [*rows, *(f"sources.notes.{name}={value}" for name, value in columns.items())]
    plan = make(load(write_recipe(tmp_path), overrides), store)
    with pytest.raises(SpecError) as raised:
        check_sources(plan)
    (problem,) = raised.value.problems
    assert problem.path == ("sources", "notes", field)
    assert message in problem.message and "/rows/b." in problem.message
    assert problem.fix == f"correct {field}."


def test_a_first_row_without_the_columns_is_no_error_of_the_plan(
    tmp_path: Path, store: Store, rows: list[str]
) -> None:
    for file in (tmp_path / "rows").glob("*.jsonl"):
        file.write_text(f'{{"url": "u"}}\n{file.read_text()}')
    plan = make(load(write_recipe(tmp_path), [*rows, "sources.notes.text_column=body"]), store)
    check_sources(plan)


def test_only_sources_that_a_pending_part_reads_are_opened(
    tmp_path: Path, store: Store, rows: list[str]
) -> None:
    overrides = [*rows, "sources.notes.text_column=body"]
    plan = make(load(write_recipe(tmp_path), overrides), store)
    check_sources(plan)
    finish(plan)
    finished = make(load(write_recipe(tmp_path), overrides), store)
    for file in (tmp_path / "rows").iterdir():
        file.unlink()
    with pytest.raises(SpecError) as raised:
        check_sources(plan)
    assert [problem.path for problem in raised.value.problems] == [("sources", "notes")]
    check_sources(finished)
