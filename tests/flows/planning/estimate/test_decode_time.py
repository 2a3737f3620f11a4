"""The time of sampling, by hand from data sheets."""

from __future__ import annotations

import pytest

from apertus_model.rehearsal.rates import Rates, clock
from flows.planning.estimate.decode_time import CACHE, Replica, decode_seconds
from specs.layer_schedule import Repeats
from specs.mamba import Mamba
from specs.model import ModelSpec

EIGHT = ModelSpec(flavour="8b")
BANDWIDTH = 4.0e12 * 2903 / 3350  # of a GH200's memory, and the fraction of it that copies reach
WEIGHTS = 2 * (8_053_338_176 - 131_072 * 4096)
PER_TOKEN = 2 * 2 * 32 * 1024  # bytes of keys and values


def replica(gpus: int = 1, width: int = 2) -> Replica:
    return Replica(EIGHT, gpus, width, Rates("GH200", 4))


def test_a_step_reads_the_weights_and_the_cache_of_every_sequence() -> None:
    assert replica().step(1, 0) == pytest.approx(WEIGHTS / BANDWIDTH)
    assert replica().step(100, 1000) == pytest.approx((WEIGHTS + 100 * 1000 * PER_TOKEN) / BANDWIDTH)
    assert replica(width=4).step(1, 0) == pytest.approx(2 * WEIGHTS / BANDWIDTH)


def test_layers_that_run_again_read_their_weights_again_and_the_keys_of_all_passes() -> None:
    """30 of 32 layers in three passes: 92 runs, each with keys of its own; 182 reads of them."""
    looped = EIGHT.model_copy(update={"repeats": Repeats(start=1, layers=30, times=3)})
    model = Replica(looped, 1, 2, Rates("GH200", 4))
    assert model.cached(1) == PER_TOKEN / 32 * 92
    layer = 4096 * (2 * 4096 + 2 * 1024 + 2 * 21_504) + 2 * 4096 + 2 * 128 + 2
    weights = WEIGHTS + 2 * (4096 + 60 * layer)
    assert model.step(1, 0) == pytest.approx(weights / BANDWIDTH)
    assert model.step(10, 1000) == pytest.approx((weights + 10 * 1000 * PER_TOKEN / 32 * 182) / BANDWIDTH)


def test_with_many_sequences_products_take_longer_than_reading_the_weights() -> None:
    """GH200: 989.5 TFLOP/s, of which products reach 720/989.5, at the clock of 560 W."""
    matrices = 2 * (32 * 4096 * (2 * 4096 + 2 * 1024 + 2 * 21_504) + 131_072 * 4096)
    assert replica().step(1000, 0) == pytest.approx(1000 * matrices / (720e12 * clock(560)))


def test_gpus_that_share_the_layers_add_their_sums() -> None:
    alone = Rates("GH200", 4)
    sums = 2 * 32 * alone.between("all-reduce", 2 * 10 * 4096, 4, 1)
    assert replica(4).step(10, 0) == pytest.approx(WEIGHTS / 4 / BANDWIDTH + sums)


def test_sequences_beyond_the_memory_wait() -> None:
    room = int((CACHE * 96e9 - 2 * 8_053_338_176) / (PER_TOKEN * 1000))
    assert replica().room(1000) == room
    seconds = decode_seconds(replica(), 10 * room, 10 * room, 500, 500)
    assert seconds == pytest.approx(10 * 499 * replica().step(room, 750))
    assert decode_seconds(replica(), 10, 4, 500, 500) == pytest.approx(2.5 * 499 * replica().step(4, 750))
    assert decode_seconds(replica(), 1, 1, 10**6, 1) is None


def test_layers_of_mamba_2_keep_a_state_of_one_size() -> None:
    """24 of 32 layers: float32 states of 32 heads x 128 x 128, and three tokens before the convolutions."""
    hybrid = EIGHT.model_copy(update={"mamba": Mamba(layers=list(range(24)))})
    model = Replica(hybrid, 1, 2, Rates("GH200", 4))
    states = 24 * (4 * 32 * 128 * 128 + 2 * 3 * (4096 + 2 * 1024))
    assert model.cached(0) == states and model.cached(1000) == states + 1000 * PER_TOKEN / 4
    weights = 2 * (hybrid.parameters - 131_072 * 4096)
    read = weights + 10 * (1000 * PER_TOKEN / 4 + 2 * states)
    assert model.step(10, 1000) == pytest.approx(read / BANDWIDTH)
