"""The table of published speeds on docs/estimates.md has every row, and says which prediction is off."""

from __future__ import annotations

import functools
import re

import pytest

from apertus_model.losses import cross_entropy
from specs.launch import Launch
from specs.layout import misfits
from tools.throughput import (
    MARK,
    MODELS,
    PAGE,
    UNKNOWN,
    Row,
    apertus,
    blackwell,
    by_formulas,
    torchtitan,
)

TEXT = PAGE.read_text().partition(f"<!-- {MARK} -->")[2].partition(f"<!-- end of {MARK} -->")[0]
LINES = [line.strip() for line in TEXT.strip().splitlines()][1:]
NAMES = [" ".join(re.split(r" {2,}", line)[:3:2]) for line in LINES]
each_row = pytest.mark.parametrize("index", range(len(LINES)), ids=NAMES)


@functools.cache
def rows() -> list[Row]:
    return [*torchtitan(), *blackwell(), *apertus()]


def test_formulas_predict_float8_and_async_tp() -> None:
    """Which change the speed of a row by what they do, in the direction that was published."""
    off = [row for row in rows() if not 0.85 < by_formulas(row).speed / row.speed < 1.15]
    assert not [row for row in off if "mxfp8" in row.name or ("float8" in row.name and row.gpus != 32)]
    whole = {row.name: by_formulas(row).speed for row in rows()}
    assert whole["Llama 70B float8"] < whole["Llama 70B float8 async"]
    assert whole["Llama 8B compile"] < whole["Llama 8B float8"]


@pytest.mark.parametrize(("name", "parameters"), [("8B", 8.03e9), ("70B", 70.6e9), ("405B", 405.9e9)])
def test_the_models_have_the_parameters_of_llama(name: str, parameters: float) -> None:
    assert MODELS[name].parameters == pytest.approx(parameters, rel=2e-3)


@each_row
def test_every_row_is_a_layout_that_fits(index: int) -> None:
    row = rows()[index]
    segment = row.segment
    launch = Launch(processes=row.gpus, parallel=segment.parallel)
    assert launch.mismatch is None
    assert not list(misfits(launch, segment.model, segment.sequence_length, segment.global_batch_size))


def test_the_batches_are_those_that_are_published() -> None:
    batches = {(row.name.split()[1], row.gpus): row.segment.global_batch_size for row in torchtitan()}
    assert batches == {("8B", 8): 16, ("8B", 128): 256, ("70B", 256): 512, ("405B", 512): 256, ("8B", 32): 64}


def test_rows_of_megatron_bridge_have_its_batches_and_micro_batches() -> None:
    rows = [(row.segment.global_batch_size, row.segment.micro_batch_size) for row in blackwell()]
    assert rows == [(128, 2), (128, 2), (256, 1)]
    assert blackwell()[2].segment.parallel.stages == 20


def test_the_table_has_every_row_in_order() -> None:
    assert len(LINES) == len(rows())
    for line, row in zip(LINES, rows(), strict=True):
        assert re.match(rf"{re.escape(row.name)} +{row.gpu} +{row.gpus:,} +{row.speed:,.0f}\b", line)


@each_row
def test_a_row_says_why_its_speed_is_15_percent_off_or_its_memory_10(index: int) -> None:
    line, row = LINES[index], rows()[index]
    published, memory, predicted, ratio, _, peak, *why = [*re.split(r" {2,}", line)[3:], ""]
    found = float(predicted.replace(",", "")) / float(published.replace(",", ""))
    assert found == pytest.approx(float(ratio), abs=0.006)
    fits = memory == "-" or 0.9 <= float(peak) <= 1.1
    assert (row.off == UNKNOWN) == (not 0.85 < found < 1.15)
    assert fits
    assert why[0] == row.off


def test_whole_logits_take_what_the_chunks_of_ours_do_not() -> None:
    """12 N V bytes; ours: a chunk in bfloat16, and the sum of the weight's gradient."""
    row = next(row for row in rows() if row.name == "Llama 8B")
    tokens, words, width = 2 * 8192, 128_256, 4096
    chunk = cross_entropy.CHUNK_TOKENS * words * 2 + 4 * words * width
    assert row.whole_logits == 12 * tokens * words - chunk
    compiled = next(row for row in rows() if row.gpu == "H200")
    assert compiled.whole_logits == 4 * tokens * words - chunk
