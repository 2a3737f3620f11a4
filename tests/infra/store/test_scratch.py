from __future__ import annotations

import ast
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store.scratch import scratch_root, temporary_folder
from specs.errors import StageError

ROOT = Path(__file__).resolve().parents[3]
MAKER = """
import sys
from infra.store.scratch import temporary_folder
with temporary_folder("train-1", sys.argv[1]) as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    input()
"""
OTHER_PROCESSES = ["bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--die-with-parent"]
"""A container that shares files and no process ids."""


@contextlib.contextmanager
def maker(root: Path, around: list[str] | None = None) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    command = [*(around or []), sys.executable, "-c", MAKER, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_is_there_for_the_length_of_a_block(tmp_path: Path) -> None:
    with temporary_folder("train-1", str(tmp_path / "new")) as folder:
        assert folder.parent == tmp_path / "new" and folder.name.startswith("apertus-train-1-")
        assert folder.stat().st_mode & 0o777 == 0o700
    with contextlib.suppress(KeyError), temporary_folder("train-1", str(tmp_path / "new")) as folder:
        (folder / "file").touch()
        raise KeyError
    assert os.listdir(tmp_path / "new") == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    with maker(tmp_path) as (process, folder):
        process.kill()
        process.wait()
        assert (folder / "file").exists()
        with temporary_folder("train-1", str(tmp_path)) as own:
            assert list(tmp_path.iterdir()) == [own]


def test_a_stage_that_commits_after_its_launcher_was_killed_keeps_the_folder(tmp_path: Path) -> None:
    user = (
        "import sys\nfrom infra.store.scratch import keep_folder\nkeep_folder(sys.argv[1]); print(); input()"
    )
    with maker(tmp_path) as (process, folder):
        command = [sys.executable, "-c", user, str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as stage:
            assert stage.stdout
            stage.stdout.readline()
            process.kill()
            process.wait()
            with temporary_folder("next", str(tmp_path)):
                assert (folder / "file").exists()
            stage.kill()
        with temporary_folder("next", str(tmp_path)):
            assert not folder.exists()


@pytest.mark.parametrize("around", [[], OTHER_PROCESSES], ids=["here", "in a container"])
def test_the_folder_of_a_running_process_stays(tmp_path: Path, around: list[str]) -> None:
    if around and shutil.which(around[0]) is None:
        pytest.skip("bubblewrap is not installed: apt-get install bubblewrap")
    with maker(tmp_path, around) as (process, folder):
        with temporary_folder("a", str(tmp_path)), temporary_folder("b", str(tmp_path)):
            assert (folder / "file").exists()
        process.communicate("\n")
        assert not folder.exists()


def test_folders_of_other_machines_other_users_and_nobody_stay(tmp_path: Path) -> None:
    with temporary_folder("lock", str(tmp_path)) as folder:
        (lock,) = (one.name for one in folder.iterdir())
    outside = tmp_path / "outside"
    for kept in (tmp_path / "apertus-other", tmp_path / "apertus-no-lock", tmp_path / "unrelated", outside):
        kept.mkdir()
    (tmp_path / "apertus-other" / f"{lock[:-1]}x").touch()  # after another boot
    (tmp_path / "unrelated" / lock).touch()
    (outside / lock).touch()
    (tmp_path / "apertus-link").symlink_to(outside)
    if os.getuid() == 0:
        (tmp_path / "apertus-user").mkdir()
        (tmp_path / "apertus-user" / lock).touch()
        os.chown(tmp_path / "apertus-user", 65534, 65534)
    before = sorted(tmp_path.rglob("*"))
    with temporary_folder("own", str(tmp_path)):
        pass
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("below", ["file", "file/below"])
def test_a_root_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("APERTUS_SCRATCH", str(tmp_path / below))
    assert scratch_root() == tmp_path / below and scratch_root("/stated") == Path("/stated")
    with pytest.raises(StageError, match=f"in '{tmp_path}/{below}': .*Fix: set APERTUS_SCRATCH"), \
            temporary_folder("a"):  # fmt: skip
        pass


def test_all_temporary_folders_are_made_here() -> None:
    """And other temporary files have no name, so that they end with their process."""
    used = {
        (str(path.relative_to(ROOT)), node.attr)
        for package in ("specs", "flows", "apertus_model", "infra")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tempfile"
    }
    assert {attribute for path, attribute in used if path != "infra/store/scratch.py"} == {
        "TemporaryFile",
        "gettempdir",
    }
