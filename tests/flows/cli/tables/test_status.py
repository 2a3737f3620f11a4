"""What `apertus status` prints: every number whole, at the widths of usual terminals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.cli.tables.runs import status_table
from flows.planning.plan import Plan
from flows.stored_part import planned_parts
from tests.flows.cli.printing import shown
from tests.flows.conftest import finish

Planned = Callable[..., Plan]


@pytest.mark.parametrize(("width", "ids"), [(60, False), (80, False), (140, True)])
def test_status_cuts_no_result_at_any_width(planned: Planned, width: int, ids: bool) -> None:
    finish(planned(), metrics={"perplexity": 123.4, "validation_loss": 4.567, "pairs": 25_120, "tokens": 7})
    plan = planned()
    text = shown(status_table(plan, width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = text.replace(",", "").split()
    for number in ("123.4", "4.567", "25120"):
        assert words.count(number) == len(plan.steps)
    assert all((part.fingerprint[:8] in text) == ids for part in planned_parts(plan).values())
