"""The table of rehearsals on docs/estimates.md is what plans say now, and the plans are within 5%."""

from __future__ import annotations

import re

import pytest

from flows.planning.estimate.memory import memory_of_rank
from tools.published import plan_of
from tools.rehearsals import HEADINGS, MARK, PAGE, speed

TEXT = PAGE.read_text().partition(f"<!-- {MARK} -->")[2].partition(f"<!-- end of {MARK} -->")[0]
LINES = [re.split(r" {2,}", line.strip()) for line in TEXT.strip().splitlines()]


def test_the_table_has_every_part_that_trains() -> None:
    assert LINES[0] == list(HEADINGS)
    stages = [tuple(line[0].split("/")[:2]) for line in LINES[1:]]
    for size in ("8b", "70b"):
        planned = list(plan_of(f"apertus-{size}").estimates.stages)
        assert list(dict.fromkeys(stage for name, stage in stages if name == size)) == planned


@pytest.mark.parametrize("line", LINES[1:], ids=lambda line: line[0])
def test_a_difference_is_that_of_the_formula_as_it_is(line: list[str]) -> None:
    size, stage, number = re.fullmatch(r"(\w+)/([\w-]+)/?(\d*).*", line[0]).groups()  # type: ignore[union-attr]
    part = plan_of(f"apertus-{size}").estimates.stages[stage].parts[int(number or 1) - 1]
    assert line[1] == f"{part.gpus:,}"
    pp = part.segment.parallel.pp
    ranks = sorted({0, min(1, pp - 1), pp - 1})
    assert len(line) == 3 + len(ranks)
    cluster = plan_of(f"apertus-{size}").pipeline.cluster
    assert cluster is not None and line[-1] == f"{speed(part, cluster):,.0f}"
    for rank, cell in zip(ranks, line[2:-1], strict=True):
        counted, difference = cell.split()
        planned = memory_of_rank(part.segment, part.gpus, rank).total
        assert planned / 1e9 / float(counted) - 1 == pytest.approx(float(difference[:-1]) / 100, abs=0.0015)
        assert abs(float(difference[:-1])) < 5
