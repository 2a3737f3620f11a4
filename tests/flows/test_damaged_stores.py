"""Whatever the JSON files of a store hold, every command ends with an answer, or with a message that names
the file: never with a traceback, nor in waiting for a file that never ends."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flows.cli.__main__ import app
from flows.planning.plan import make
from infra.store import Store
from infra.store.documents import Unit
from infra.store.writing.retention import refer
from specs.foreign import trail
from specs.recipe import load
from tests.flows.conftest import finish
from tests.flows.planning.test_bad_recipes import places
from tests.flows.test_damaged_models import HOSTILE, damage
from tests.machine import slow
from tests.recipes import write_recipe

SECONDS = 30.0
COMMANDS = [
    *(
        "plan SPEC",
        "status SPEC",
        "report SPEC -o OUT.html",
        "metrics SPEC -o OUT.csv",
        "lineage SPEC export",
        "diff SPEC SPEC:evaluate",
    ),
    *(
        "lineage tiny",
        "diff tiny SPEC",
        "runs",
        "gc --grace 0s",
        "gc --grace 0s --yes",
        "forget tiny",
        "cp SPEC OUT",
        "cp tiny OUT",
    ),
    *(
        "verify SPEC",
        "verify --all",
        "verify --all --fix",
        "branch SPEC pretrain@step=8 --name other -o OUT.yaml",
    ),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and `store`, in which all of it is finished, once over."""
    folder = tmp_path_factory.mktemp("sound")
    recipe = write_recipe(folder)
    store = Store.open(str(folder / "store"))
    store.initialise()
    plan = make(load(recipe), store)
    finish(plan)
    segment = next(node for node in plan.graph.nodes.values() if node.end_step is not None)
    refer(store, segment.path, segment.end_step or 0, plan.graph.nodes["export"].path)
    store.write_document(f"{segment.path}/units/task.json", Unit(attempt="a", data={}, files={}))
    shutil.rmtree(folder / "store" / "scratch", ignore_errors=True)
    return folder


def run(sound: Path, folder: Path, command: str, *options: str) -> Result:
    """What a command says of the store of `folder`, within `SECONDS`."""
    trail.clear()
    words = [
        word.replace("SPEC", str(sound / "tiny.yaml")).replace("OUT", str(folder / "out"))
        for word in command.split()
    ]
    begun = time.monotonic()
    result = CliRunner().invoke(app, [*options, *words, "--store", str(folder / "store")])
    assert time.monotonic() - begun < SECONDS
    assert result.exit_code in (0, 1, 2)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output or "--debug" in options
    return result


def copied(sound: Path, folder: Path) -> Store:
    for old in ("store", "out"):
        shutil.rmtree(folder / old, ignore_errors=True)
    shutil.copytree(sound / "store", folder / "store")
    return Store.open(str(folder / "store"))


def without_checksum(file: Path, **fields: object) -> None:
    """Makes a document one of a program that adds no checksum, and states other fields."""
    document = json.loads(file.read_text()) | fields
    document.pop("checksum", None)
    file.write_text(json.dumps(document))


def documents(sound: Path) -> list[str]:
    """One JSON file of every kind that the store has."""
    root = sound / "store"
    names = sorted(
        str(path.relative_to(root)) for path in root.rglob("*.json") if "/attempts/" not in str(path)
    )
    return list({(name.split("/")[0], kind_of(name)): name for name in names}.values())


@cache
def fields(sound: Path) -> list[tuple[str, tuple[Any, ...]]]:
    return [
        (name, path)
        for name in documents(sound)
        for path in ((), *places(json.loads((sound / "store" / name).read_text())))
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_sound_store_serves_every_command(sound: Path, tmp_path: Path, command: str) -> None:
    copied(sound, tmp_path)
    result = run(sound, tmp_path, command)
    assert result.exit_code == 0 or "there are no rows to write" in result.output, result.output


@pytest.mark.slow
@given(data=st.data(), command=st.sampled_from(COMMANDS), value=st.sampled_from(HOSTILE))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_field_is_met_with_an_answer_or_named(
    sound: Path, tmp_path: Path, data: st.DataObject, command: str, value: str
) -> None:
    name, path = data.draw(st.sampled_from(fields(sound)))
    copied(sound, tmp_path)
    if data.draw(st.booleans()):
        without_checksum(tmp_path / "store" / name)
    damage(tmp_path / "store" / name, path, value)
    result = run(sound, tmp_path, command)
    assert not result.exit_code or "error: " in result.output or "damaged: " in result.output, result.output
    assert "unexpected" not in result.output, result.output
    assert len(result.output) < 1_000_000


WHOLE: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(b"{"),
    "empty": lambda file: file.write_bytes(b""),
    "deep": lambda file: file.write_bytes(b"[" * 100_000 + b"]" * 100_000),
    "list": lambda file: file.write_bytes(b"[1]"),
    "number": lambda file: file.write_bytes(b'{"attempt": %s}' % (b"9" * 5000)),
    "UTF-16": lambda file: file.write_bytes(file.read_text().encode("utf-16")),
    "folder": lambda file: (file.unlink(), file.mkdir(), (file / "inside").write_text("x")),
    "pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "device": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "long": lambda file: os.truncate(file, 2**40),
}


def kind_of(name: str) -> str:
    """What sort of file of a store it is."""
    if name.startswith(("runs/", "inputs/", "protected/")) or name == "format.json":
        return name.split("/")[0]
    return name.split("/")[2].split("-")[0]


def one_of_each(sound: Path) -> dict[str, str]:
    return {kind_of(name): name for name in documents(sound)}


KINDS = ["identity.json", "manifest", "checkpoints", "units", "references", "runs"]
CASES = [("manifest.json", how) for how in WHOLE] + [
    (kind, how) for kind in KINDS for how in ("deep", "pipe")
]
FURTHER_CASES = [slow(kind, how) for kind in KINDS for how in ("list", "folder")]


@pytest.mark.parametrize(("kind", "how"), [*CASES, *FURTHER_CASES])
def test_a_file_that_is_none_is_named_and_verify_mends_it(
    sound: Path, tmp_path: Path, kind: str, how: str
) -> None:
    name = one_of_each(sound)[kind]
    copied(sound, tmp_path)
    WHOLE[how](tmp_path / "store" / name)
    for command in ("plan SPEC", "status SPEC", "gc --grace 0s", "cp SPEC OUT", "lineage SPEC export"):
        assert "unexpected" not in run(sound, tmp_path, command).output
    found = run(sound, tmp_path, "verify --all")
    assert found.exit_code == 1
    assert name in found.output.replace("\n", "")
    assert run(sound, tmp_path, "verify --all --fix").exit_code == 1
    after = run(sound, tmp_path, "verify --all")
    assert after.exit_code == 0, after.output
    assert not (tmp_path / "store" / name).exists()
    [kept] = (tmp_path / "store" / "damaged").glob(f"*/{name}")
    assert kept.is_symlink() or kept.exists()
    for command in ("plan SPEC", "status SPEC", "gc --grace 0s", "cp SPEC OUT"):
        result = run(sound, tmp_path, command)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("how", WHOLE)
def test_what_is_advised_for_a_damaged_version_mends_the_store(sound: Path, tmp_path: Path, how: str) -> None:
    copied(sound, tmp_path)
    file = tmp_path / "store" / "format.json"
    WHOLE[how](file)
    for command in ("plan SPEC", "gc", "cp tiny OUT", "verify --all --fix"):
        result = run(sound, tmp_path, command)
        assert result.exit_code == 2, command
        assert "format.json" in result.output
    if how != "device":
        assert 'replace it with a file that contains {"format": 3}' in result.output.replace("\n", "")
    shutil.rmtree(file) if how == "folder" else file.unlink()
    file.write_text('{"format": 3}')
    assert run(sound, tmp_path, "verify --all").exit_code == 0


def test_an_artifact_that_was_made_from_itself_is_named(sound: Path, tmp_path: Path) -> None:
    store = copied(sound, tmp_path)
    path = load_plan(sound, store).graph.nodes["export"].path
    file = tmp_path / "store" / path / "identity.json"
    itself = {"kind": "export", "fingerprint": path.split("/")[1], "name": "export"}
    without_checksum(file, inputs={"itself": itself})
    result = run(sound, tmp_path, f"lineage {path}")
    assert result.exit_code == 2
    assert f"'{path}/identity.json'" in result.output
    assert "names itself" in result.output.replace("\n", " ")


def load_plan(sound: Path, store: Store) -> Any:
    return make(load(sound / "tiny.yaml"), store)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*args: object, **options: object) -> None:
        raise KeyError("x" * 10_000)

    monkeypatch.setattr("flows.planning.plan.make", fail)
    return iter(())


def test_an_error_that_nobody_expected_is_a_message_with_the_file_that_was_read_last(
    sound: Path, tmp_path: Path, broken: object
) -> None:
    copied(sound, tmp_path)
    result = run(sound, tmp_path, "plan SPEC")
    assert result.exit_code == 1
    error = result.output.replace("\n", "")
    assert error.startswith("error: unexpected KeyError: 'xxx")
    assert f"the file that was read last is 'format.json' in the store {tmp_path}/store" in error
    assert len(error) < 1_000
    told = run(sound, tmp_path, "plan SPEC", "--debug")
    assert told.exit_code == 1
    assert "Traceback" in told.output and "KeyError" in told.output


@pytest.mark.parametrize("store", ["~nouser/x", "a\0b", "nonsense://x", "/dev/null", "s3://"])
def test_a_store_that_cannot_be_opened_is_named(sound: Path, store: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(sound / "tiny.yaml"), "--store", store])
    assert result.exit_code == 2, result.output
    assert "error: " in result.output
