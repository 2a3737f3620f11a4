"""A torch that a rehearsal does not know is told by the name that it lacks."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from apertus_model.rehearsal import fake_cuda, patches
from apertus_model.rehearsal.patches import MissingTarget, Patch
from apertus_model.rehearsal.rates import (
    ATTENTION,
    HOPPER,
    LINK,
    MEMORY,
    SHEETS,
    Rates,
    clock,
    hidden_seconds,
    unmasked,
)

RATES = Rates("H100", 4)
TABLES = {
    "cuda": patches.cuda(RATES, stream=None),
    "world": patches.world(SimpleNamespace(agree=None, send=None, receive=None)),
    "values": patches.values(print, print, print, print),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_name_that_is_replaced_exists(name: str) -> None:
    patches.check(patch.target for patch in TABLES[name])


def test_every_inner_name_that_is_used_exists() -> None:
    patches.check(patches.USED)


@pytest.mark.parametrize(
    "missing", ["torch.cuda.of_a_later_release", "torch.later.name", "torch.Tensor.later.name", "later.name"]
)
def test_a_missing_name_is_an_error_and_nothing_is_replaced(missing: str) -> None:
    before = torch.cuda.is_available
    with pytest.raises(MissingTarget, match=rf"has no {missing}, which.*Fix: install the release"):
        patches.apply(
            [Patch("torch.cuda.is_available", patches.always(True)), Patch(missing, patches.always(1))]
        )
    assert torch.cuda.is_available is before


def test_all_missing_names_are_reported_at_once() -> None:
    with pytest.raises(MissingTarget, match=r"has no torch\.one, torch\.two, which"):
        patches.apply(
            [Patch(f"torch.{name}", patches.always(None)) for name in ("one", "cuda.Stream", "two")][::2]
        )


def test_without_a_compiler_one_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(fake_cuda.NoFakeCuda, match=r"finds no absent-g\+\+; install it"):
        fake_cuda.shared_object(tmp_path, cache=tmp_path, compiler="absent-g++")
    assert os.listdir(tmp_path) == []


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(
        fake_cuda.NoFakeCuda, match=r"cannot compile fake_cuda.cpp for torch .*no such header"
    ):
        fake_cuda.shared_object(tmp_path, cache=tmp_path / "cache", compiler=str(script))
    assert os.listdir(tmp_path / "cache") == []


def test_what_was_compiled_is_used_again(tmp_path: Path) -> None:
    script = tmp_path / "compiler"
    script.write_text(
        f"#!/bin/sh\necho run >> {tmp_path}/runs\n"
        'for last; do [ "$before" = -o ] && : > "$last"; before=$last; done\n'
    )
    script.chmod(0o755)
    found = {fake_cuda.shared_object(tmp_path, cache=tmp_path, compiler=str(script)) for _ in range(2)}
    assert len(found) == 1 and (tmp_path / "runs").read_text() == "run\n"


def test_an_operator_takes_the_longer_of_computing_and_moving() -> None:
    assert RATES.compute(989.5e12, 0, "matrix", 2) == pytest.approx(1 / HOPPER)
    assert RATES.compute(989.5e12, 0, "matrix", 4) == pytest.approx(989.5 / 67 / HOPPER)
    assert RATES.compute(989.5e12, 0, "attention", 2) == pytest.approx(1 / ATTENTION)
    assert RATES.compute(1, 3.35e12, "attention", 2) == pytest.approx(1 / MEMORY)
    assert RATES.compute(1280e12, 0, "matrix", 1) == pytest.approx(1)
    with pytest.raises(ValueError, match="A100 multiplies nothing in float8"):
        Rates("A100", 8).compute(1, 0, "matrix", 1)
    limited = Rates("H100-HBM2e", 8)
    assert limited.compute(568.9e12, 0, "matrix", 2) == pytest.approx(1, rel=1e-3)
    assert limited.compute(0, 2.4e12, "memory", 2) == pytest.approx(1 / MEMORY)
    assert all(sheet.source and 0 < sheet.matrix < 1 and 0 < sheet.clock <= 1 for sheet in SHEETS.values())


def test_a_step_whose_operators_compute_half_of_the_time_can_use_half_of_the_peak() -> None:
    """At the data sheet's rates: a second each of products and attention, two of passes over memory."""
    assert RATES.bound({"matrix": 1 / HOPPER, "attention": 1 / ATTENTION, "memory": 2 / MEMORY}) == 0.5
    limited = Rates("H100-HBM2e", 8)
    products = 1 / HOPPER / clock(500)
    assert limited.bound({"matrix": products, "attention": 0, "memory": 3 / MEMORY}) == pytest.approx(0.25)


def test_a_gpu_with_a_lower_power_limit_multiplies_more_slowly() -> None:
    """Measured at 500 W: 569 of 720 TFLOP/s in bfloat16, and on average 1,117 in float8."""
    assert clock(700) == 1
    assert clock(500) == pytest.approx(568.9 / 720, rel=1e-3)
    assert clock(600) == pytest.approx((1 + clock(500)) / 2)
    assert Rates("H200", 8).speed("matrix", 1) == pytest.approx(1280e12)
    assert Rates("H100-HBM2e", 8).speed("matrix", 1) == pytest.approx(1117e12, rel=1e-3)
    assert Rates("GH200", 4).speed("matrix", 1) == pytest.approx((0.7 * 1117 + 0.3 * 1280) * 1e12, rel=1e-3)


@pytest.mark.parametrize(
    ("collective", "product", "hidden"),
    [(4.0, 1.0, 0.75), (1.0, 4.0, 0.75), (2.0, 2.0, 1.5), (1.0, 0.0, 0.0)],
)
def test_a_product_in_four_parts_hides_a_collective_but_for_a_part(
    collective: float, product: float, hidden: float
) -> None:
    """Each part is sent while the next is computed: the longer one takes its time, the other a part of it."""
    assert hidden_seconds(collective, product, 4) == hidden
    assert collective + product - hidden == max(collective, product) + min(collective, product) / 4


def test_kernels_compute_the_scores_that_the_causal_mask_leaves() -> None:
    """Of four queries and keys 4 x 4 / 2, without the diagonal; of the last two queries 2 x 3."""
    assert unmasked(4, 4) == 1 / 2
    assert unmasked(2, 4) == 3 / 4
    assert unmasked(1, 8) == 15 / 16


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all-gather", [0], 0.0),
        ("all-gather", [0, 1, 2, 3], 8.4e-6 + 2 * 3.4e-6 + 0.75 * 1e9 / 380e9),
        ("all-reduce", [0, 1], 8.4e-6 + 2 * 3.4e-6 + 2 * 0.5 * 1e9 / 380e9),
        ("send", [0, 4], 8.4e-6 + 9.6e-6 + 1e9 / 50e9),
        ("reduce-scatter", [0, 4], 8.4e-6 + 9.6e-6 + 0.5 * 1e9 / 50e9),
        # two GPUs of each node have a card each
        ("reduce-scatter", [0, 1, 4, 5], 8.4e-6 + 2 * 9.6e-6 + 0.75 * 1e9 / 100e9),
    ],
)
def test_a_collective_takes_its_latency_and_its_bytes_over_the_slowest_link(
    kind: str, ranks: list[int], seconds: float
) -> None:
    assert RATES.collective(kind, 1e9, ranks) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all-gather", [0, 1], 0.5 * 1e9 / 150e9),
        ("send", [0, 3], 1e9 / 150e9),
        ("all-gather", [0, 1, 2, 3], 0.75 * 1e9 / 450e9),
        ("all-gather", [0, 1, 4, 5], 0.75 * 1e9 / 50e9 * LINK),  # the network's two cards are slower
    ],
)
def test_without_a_switch_two_gpus_have_the_links_between_them_alone(
    kind: str, ranks: list[int], seconds: float
) -> None:
    """Four GH200 of a node, each with a third of its links to each of the others."""
    assert Rates("GH200", 4).collective(kind, 1e9, ranks) == pytest.approx(seconds / LINK, rel=0.01)
