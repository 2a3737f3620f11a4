"""The learning rate is a function of the step."""

from pathlib import Path

import pytest

from specs.schedule import Schedule
from tests.apertus_model.harness import segment, train


def test_the_learning_rate_is_that_of_the_tokens_consumed_before_the_step(tmp_path: Path) -> None:
    schedule = Schedule(warmup_tokens=128, decay="linear", decay_start=256, decay_tokens=128, final=0.1)
    rows = train(tmp_path, segment(schedule=schedule))[0].rows
    assert [row["lr"] for row in rows] == pytest.approx([0.0, 0.005, 0.01, 0.01, 0.01, 0.0055])
