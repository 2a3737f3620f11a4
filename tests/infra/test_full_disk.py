"""A full disk costs nothing that is committed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from tests.infra.faults import Faults
from tests.infra.test_faults import Place

FULL_DISK = """
import resource, sys, time
from pathlib import Path
from infra.store import Store
from tests.infra.test_faults import work
time.sleep = lambda seconds: None
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    work(Store.open(sys.argv[1]), Path(sys.argv[3]))
except OSError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.parametrize("limit", [0, 1300])
def test_a_disk_that_takes_no_more_leaves_what_is_committed(tmp_path: Path, limit: int) -> None:
    """The system's own refusal, by a limit on the length of files, which needs no rights: a write is cut
    in the middle. The shorter limit is met by the first marker, the longer one by a file of a checkpoint."""
    store, sound = tmp_path / "store", tmp_path / "sound"
    command = [sys.executable, "-c", FULL_DISK, str(store), str(limit), str(tmp_path / "scratch")]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 1 and "refused: " in ended.stderr, ended.stderr
    place = Place(fsspec.filesystem("file"), str(store), tmp_path / "scratch")
    assert place.damaged() == []
    place.work(Faults())
    uncut = Place(place.fs, str(sound), tmp_path / "scratch")
    uncut.work(Faults())
    assert place.result() == uncut.result()
