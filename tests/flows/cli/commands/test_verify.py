"""`apertus verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.__main__ import app
from infra.store import Artifact, Store
from infra.store.documents import to_json
from tests.infra.store.maintenance.verified import (
    CORPUS,
    change,
    stored,
)
from tests.recipes import edit, line_of, write_recipe


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return stored(tmp_path)


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_ends_with_one_when_something_is_damaged_and_fixes_when_told(store: Store) -> None:
    assert command("--all", "--store", store.url)[0] == 0
    change(store, f"{CORPUS}/attempts/first/a.bin")
    code, output = command("--all", "--store", store.url)
    assert code == 1
    assert (
        f"damaged: my-corpus-c1: '{CORPUS}/attempts/first/a.bin' is damaged: piece 0 of 21 (bytes 0 to 1024)"
        in output
    )
    assert "to rerun: my-corpus-c1 (damaged)" in output
    assert "kept: my-export-e1 (made from my-pretrain-b1)" in output
    assert Artifact(store, CORPUS).complete
    code, output = command("--all", "--fix", "--json", "--store", store.url)
    document: dict[str, Any] = json.loads(output)
    assert (code, document["withdrawn"]) == (1, [f"{CORPUS}/manifest.json"])
    assert document["damaged"][0]["pieces"] == [0]
    names = {what: [part["name"] for part in document[what]] for what in ("rerun", "kept")}
    assert names == {"rerun": ["my-corpus-c1"], "kept": ["my-pretrain-b1", "my-export-e1"]}
    assert not Artifact(store, CORPUS).complete
    assert command("--all", "--store", store.url)[0] == 0


def test_documents_without_a_checksum_are_named(store: Store) -> None:
    assert "checksum" not in command("--all", "--store", store.url)[1]
    path = f"{CORPUS}/manifest.json"
    store.replace(path, to_json(store.read_json(path)))
    code, output = command("--all", "--store", store.url)
    assert (code, f"no checksum: {path}; their writers can add it" in output) == (1, True)
    assert json.loads(command("--all", "--json", "--store", store.url)[1])["without_checksum"] == [path]


def test_the_command_needs_a_recipe_or_an_existing_store(tmp_path: Path) -> None:
    assert command()[0] == 2
    assert command("--all", "--store", str(tmp_path / "none"))[0] == 2


def test_a_recipe_whose_source_is_gone_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = edit(write_recipe(tmp_path), (str(tmp_path / "documents"), str(tmp_path / "gone")))
    code, output = command(str(path), "--store", str(tmp_path / "store"))
    assert (code, f"{path}:{line_of(path, 'notes: {url')}: sources.notes: " in output) == (2, True)
