"""Launch settings: intervals of checkpoints and the wait between attempts."""

from __future__ import annotations

import pytest

from specs.launch import Checkpointing, Retries
from specs.units import Duration


def test_interval_is_in_steps_or_time() -> None:
    assert Checkpointing(interval=30).due(60)
    timed = Checkpointing.model_validate({"interval": "30 min", "milestones": [7], "keep_every": 50})
    assert timed.seconds == 1800
    assert [step for step in range(1, 110) if timed.due(step)] == [7, 50, 100]
    assert Checkpointing.model_validate(timed.model_dump(mode="json")) == timed
    for wrong in (0, -5, "0s", "often", True, 1.5):
        with pytest.raises(
            ValueError, match=r"is not an interval; write steps, such as 100, or a time, such as '30min'"
        ):
            Checkpointing.model_validate({"interval": wrong})


def test_the_wait_before_a_retry_doubles_up_to_ten_minutes() -> None:
    waits = Retries(attempts=200, backoff=Duration(30.0))
    assert [waits.wait(before) for before in (0, 1, 2, 4, 5, 199)] == [30, 60, 120, 480, 600, 600]
    assert Retries(backoff=Duration(3600.0)).wait(3) == 3600
