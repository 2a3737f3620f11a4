"""Triton kernels on a CPU, by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def interpreted(script: Path) -> Any:
    """What a script prints as JSON, in a process that interprets kernels: that is chosen before Triton is
    imported."""
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
