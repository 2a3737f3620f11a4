"""How often the program writes one fact down."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FORMS, FILES = 6, 10


@pytest.mark.slow
def test_a_rate_a_loss_and_a_token_have_few_forms_and_few_files() -> None:
    walked = subprocess.run(
        [sys.executable, "-m", "tools.facts"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert walked.returncode == 0, walked.stderr
    counted = [tuple(map(int, found)) for found in re.findall(r": (\d+) forms, (\d+) files", walked.stdout)]
    assert len(counted) == 3, walked.stdout
    assert all(0 < forms <= FORMS and 0 < files <= FILES for forms, files in counted), walked.stdout
