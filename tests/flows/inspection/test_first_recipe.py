"""Recipes for the files of a folder: each that is written can be planned."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.inspection.first_recipe import look, recipe
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from specs.sources import MAX_DOCUMENT_BYTES
from tests.e2e.conftest import ROOT

LINE = "A kite needs wind, a line and a tail, which keeps it upright. "
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def _lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _parquet(path: Path, rows: list[dict[str, object]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda folder: [(folder / f"{n}.txt").write_text(LINE * 40) for n in range(4)],
    "markdown in folders": lambda folder: (folder / "notes.md").write_text(LINE * 60),
    "compressed text": lambda folder: (folder / "long.txt.gz").write_bytes(
        gzip.compress("".join(f"{n} {LINE}" for n in range(900)).encode(), 1)
    ),
    "code": lambda folder: (folder / "program.PY").write_text("print('a kite')  # flies\n" * 90),
    "rows": lambda folder: (folder / "rows.jsonl").write_bytes(_lines(*[{"text": LINE * 4, "id": 1}] * 20)),
    "rows of another column": lambda folder: (folder / "bodies.jsonl.bz2").write_bytes(
        bz2.compress(_lines(*[{"body of it": f"{n} {LINE * 40}", "url": "x"} for n in range(900)]))
    ),
    "Parquet": lambda folder: _parquet(
        folder / "table.parquet", [{"text": f"{n} {LINE}"} for n in range(99)]
    ),
    "chats": lambda folder: (folder / "chats [1]*.jsonl").write_bytes(_lines(*[{"messages": TURNS}] * 9)),
    "prompts": lambda folder: _parquet(
        folder / "asked.parquet", [{"prompt": "hi", "completion": "hello"}] * 9
    ),
    "pairs": lambda folder: (folder / "pairs.jsonl").write_bytes(
        _lines(*[{"prompt": "hi", "chosen": "hello", "rejected": "no"}] * 9)
    ),
    "unknown": lambda folder: (folder / "picture.png").write_bytes(b"\x89PNG" * 999),
    "broken": lambda folder: (folder / "broken.parquet").write_bytes(b"PAR1" * 999),
    "hidden": lambda folder: (folder / ".cache.jsonl").write_bytes(b"{}"),
}
DOCUMENTS = set(list(WRITERS)[:7])


def _plan(folder: Path) -> Plan:
    path = folder / "recipe.yaml"
    path.write_text(recipe(look(folder)), encoding="utf-8")
    return make(load(path, []), Store.open(str(folder / "apertus-store")))


@pytest.mark.parametrize(
    "kinds",
    [(kind,) for kind in WRITERS] + [("text", kind) for kind in WRITERS] + [(*WRITERS,)],
    ids=" and ".join,
)
def test_a_recipe_of_any_files_can_be_planned(kinds: tuple[str, ...], tmp_path: Path) -> None:
    for kind in kinds:
        WRITERS[kind](tmp_path)
    if not DOCUMENTS & {*kinds}:
        with pytest.raises(SpecError, match="has no text that a model could begin with"):
            look(tmp_path)
        return
    found = look(tmp_path)
    plan = _plan(tmp_path)
    files = {
        kind: {file for group in found.groups if group.format == "chat" for file in group.files}
        for kind in kinds
    }
    chats = {"chats": "chats [1]*.jsonl", "prompts": "asked.parquet", "pairs": "pairs.jsonl"}
    assert all(name in files[kind] for kind, name in chats.items() if kind in kinds)
    assert ("sft" in plan.pipeline.stages) == bool({"chats", "prompts"} & {*kinds})
    listed = {name: [file.path for file in listing.files] for name, listing in plan.graph.listings.items()}
    assert {name: sorted(paths) for name, paths in listed.items()} == {
        group.name: sorted(group.files) for group in found.groups if group.name in listed
    }
    left_out = {"unknown": ".png", "broken": ".parquet"}
    assert {*found.left_out} == {
        f"{left_out[kind]}, of no known format" for kind in kinds if kind in left_out
    }


def test_the_longest_column_of_texts_is_that_of_the_documents(tmp_path: Path) -> None:
    WRITERS["rows of another column"](tmp_path)
    [group] = look(tmp_path).groups
    assert (group.format, group.text_column) == ("jsonl", "body of it")


def test_files_that_are_added_later_are_read_unless_other_kinds_have_their_suffix(tmp_path: Path) -> None:
    for kind in ("text", "rows", "chats"):
        WRITERS[kind](tmp_path)
    globs = {group.name: group.include for group in look(tmp_path).groups}
    assert globs == {"texts": ["**/*.txt"], "rows": ["rows.jsonl"], "chats": ["chats [[]1][*].jsonl"]}


def test_a_text_that_is_longer_than_a_source_has_by_default_is_read(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text(LINE * (2**24 // len(LINE) + 1))
    WRITERS["rows"](tmp_path)
    sources = _plan(tmp_path).pipeline.sources
    assert sources["texts"].max_document_bytes == (tmp_path / "all.txt").stat().st_size
    assert sources["rows"].max_document_bytes == MAX_DOCUMENT_BYTES


def test_a_few_words_are_too_little(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A kite.")
    with pytest.raises(SpecError, match="has no text that a model could begin with"):
        look(tmp_path)
    WRITERS["code"](tmp_path)
    assert look(tmp_path).left_out == {"texts with 7 bytes, which are too few": 1}


@pytest.mark.slow
def test_a_recipe_of_text_chats_and_pairs_runs_to_its_export(tmp_path: Path) -> None:
    for kind in ("text", "rows", "chats", "pairs"):
        WRITERS[kind](tmp_path)
    with (tmp_path / "rows.jsonl").open("ab") as rows:
        rows.write(_lines({"body": LINE}))  # a row without its column
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / ".prefect"), "COLUMNS": "200"}

    def apertus(*arguments: str) -> str:
        line = [sys.executable, "-m", "flows.cli", *arguments]
        ran = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    apertus("init", str(tmp_path))
    recipe_file = str(tmp_path / "recipe.yaml")
    apertus("run", recipe_file)
    parts = {part["name"]: part for part in json.loads(apertus("status", recipe_file, "--json"))["parts"]}
    assert {"corpus/texts", "corpus/rows", "chat/chats", "chat/pairs", "sft", "dpo", "export"} < parts.keys()
    assert {part["state"] for part in parts.values()} == {"finished"}
    assert parts["corpus/rows"]["metrics"]["rejected"] == {"no_columns": 1}
