"""How tests are spread over processes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_test_that_ends_its_process_runs_once_and_all_others_do(tmp_path: Path) -> None:
    """xdist's own scheduler runs it again in each process that replaces one, and gives a process a single
    test, which it begins when it knows the next one: the run never ends."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    (tmp_path / "test_0.py").write_text(
        "import os\ndef test_ends():\n    open('runs', 'a').write('ran\\n')\n    os._exit(1)\n"
    )
    for number in range(1, 6):
        (tmp_path / f"test_{number}.py").write_text("def test_passes():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "1 failed, 5 passed" in done.stdout
    assert (tmp_path / "runs").read_text() == "ran\n"
