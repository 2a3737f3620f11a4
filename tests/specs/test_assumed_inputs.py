"""Which files of a recipe may be unavailable when it is planned."""

from __future__ import annotations

import pytest

from specs.assumed_inputs import AssumedInputs


@pytest.mark.parametrize(
    ("url", "covered"),
    [
        ("/data/list.txt", True),
        ("/models/reward", True),
        ("/models/reward/config.json", True),
        ("s3://bucket/tasks/a.yaml", True),
        ("/models/rewards", False),
        ("/models", False),
        ("/data/list.txt.gz", False),
        ("s3://bucket/task", False),
    ],
)
def test_a_stated_folder_covers_itself_and_all_below_it(url: str, covered: bool) -> None:
    assumed = AssumedInputs(files=["/data/list.txt", "/models/reward", "s3://bucket/tasks/"])
    assert assumed.covers(url) is covered
