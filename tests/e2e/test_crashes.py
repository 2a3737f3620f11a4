"""kill -9 of any process at any moment: what comes out in the end is what comes out of an uninterrupted run,
bit by bit.

`make test-all` kills five times, and at least a hundred times in four variants, most often in the one that
starts quickest. With `--crashes` it writes docs/crashes.json and the table of docs/crashes.md; `--crash-seed`
draws the same moments and choices again, and whom they hit also depends on how quick the machine is.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.crash_table import Row, rows_of, table
from tests.e2e.crashes import Lineage, interrupted, write_recipe

KILLS = {("disk", 1): 75, ("disk", 2): 9, ("swift", 1): 9, ("swift", 2): 9}  # by place and processes
KILLS_OF_A_LINEAGE = 9
AT_THE_SAME_TIME = 2


@contextmanager
def place(request: pytest.FixtureRequest, name: str, home: Path) -> Iterator[str]:
    """Where stores are made: a folder, or a bucket of the server of that name."""
    if name == "disk":
        yield str(home)
    else:
        with request.getfixturevalue(name).in_environment() as bucket:
            yield bucket


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_five_kills_everything_has_the_same_bits(tmp_path: Path, crash_seed: int) -> None:
    print(f"--crash-seed {crash_seed}")
    recipe = write_recipe(tmp_path, processes=1, whole=False)
    reference, lineages = killed_often(tmp_path, recipe, str(tmp_path), crash_seed, kills=5)
    assert sum(len(lineage.kills) for lineage in lineages) >= 5
    for lineage in lineages:
        assert lineage.result == reference.result, lineage.kills


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("where", ["disk", "swift"])
@pytest.mark.parametrize("processes", [1, 2])
def test_after_any_number_of_kills_everything_has_the_same_bits(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    crash_seed: int,
    crash_rows: list[Row],
    where: str,
    processes: int,
) -> None:
    print(f"--crash-seed {crash_seed}")
    recipe = write_recipe(tmp_path, processes)
    with place(request, where, tmp_path) as url:
        kills = KILLS[where, processes]
        reference, lineages = killed_often(tmp_path, recipe, url, crash_seed, kills=kills)
    wrong = [lineage.kills for lineage in lineages if lineage.result != reference.result]
    crash_rows += rows_of(where, processes, crash_seed, lineages, reference.result)
    assert wrong == []


def killed_often(
    home: Path, recipe: Path, url: str, seed: int, *, kills: int
) -> tuple[Lineage, list[Lineage]]:
    """A run that is not killed, and lineages, some at a time, until there were so many kills."""
    reference = interrupted(home, recipe, f"{url}/reference", Random(seed), 0)
    lineages: list[Lineage] = []

    def lineage(number: int, each: int) -> Lineage:
        random = Random(f"{seed} {url[:5]} {recipe.name} {number}")
        return interrupted(home, recipe, f"{url}/store-{number}", random, each, reference.seconds)

    with ThreadPoolExecutor(AT_THE_SAME_TIME) as pool:
        while (missing := kills - sum(len(one.kills) for one in lineages)) > 0:
            count = max(min(AT_THE_SAME_TIME, missing), round(missing / KILLS_OF_A_LINEAGE))
            each = min(ceil(missing / count), KILLS_OF_A_LINEAGE)
            lineages += pool.map(lineage, range(len(lineages), len(lineages) + count), [each] * count)
    return reference, lineages


def test_the_table_counts_lineages_and_kills_by_victim() -> None:
    from tests.e2e.crashes import Kill

    lineages = [
        Lineage([Kill("torchrun", "sft", 2.0), Kill("launcher", "start", 0.5)], {"a": 1}),
        Lineage([Kill("torchrun", "sft", 1.0)], {}),
    ]
    rows = rows_of("disk", 2, 7, lineages, {"a": 1})
    expected: list[dict[str, Any]] = [
        {
            "store": "disk", "processes": 2, "seed": 7, "lineages": 2, "kills": 3, "identical": 1,
            "victims": {"launcher": 1, "torchrun": 2}, "parts": {"sft": 2, "start": 1},
        }
    ]  # fmt: skip
    assert rows == expected
    assert (
        table(rows).splitlines()[-1]
        == "| disk | 2 | 3 | launcher 1, torchrun 2 | sft 2, start 1 | 1 of 2 | 7 |"
    )
