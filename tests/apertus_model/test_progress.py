"""Progress of a stage."""

from __future__ import annotations

import json

import pytest

from apertus_model.progress import Progress
from specs.job import REPORT


def test_progress_goes_into_the_output_where_there_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(REPORT).update(1, 2, "steps", loss=3.5)
    assert json.loads(capsys.readouterr().out.removeprefix(REPORT)) == {
        "done": 1,
        "total": 2,
        "unit": "steps",
        "metrics": {"loss": 3.5},
    }
