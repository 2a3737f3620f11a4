"""Hours, energy and cost: arithmetic by hand, and the published number."""

from __future__ import annotations

import pytest

from flows.planning.estimate import flops
from flows.planning.estimate.time_and_cost import spent
from specs.cluster import GPUS, Cluster
from specs.settings import Precision
from tests.flows.planning.segments import segment


def test_hours_energy_and_cost_follow_from_the_utilisation() -> None:
    """989.5 TFLOP/s at one half for an hour, on two GPUs."""
    cluster = Cluster(gpu="H100", mfu=0.5, price_per_gpu_hour=3, power_per_gpu=500, pue=1.2)
    assert spent(989.5e12 * 3600, 2, 0.5, cluster) == pytest.approx((3600.0, 2.0, 1.2, 6.0))
    assert spent(1e20, 2, None, cluster) == (None, None, None, None)
    assert spent(1e20, 2, 0.5, Cluster(gpu="H100", mfu=0.5)).cost is None


def test_the_published_throughput_of_70b_is_its_published_gpu_hours() -> None:
    """Report: 723 tokens per second and GPU on GH200, about 6 million GPU-hours in all."""
    per_token = flops.training(segment("70b"))
    mfu = 723 * per_token / GPUS["GH200"].bf16_flops
    assert mfu == pytest.approx(0.328, abs=1e-3)
    hours = spent(15e12 * per_token, 4096, mfu, Cluster(gpu="GH200")).gpu_hours
    assert hours == pytest.approx(15e12 / 723 / 3600)
    assert hours == pytest.approx(6e6, rel=0.05)


def test_products_in_float8_take_the_time_of_float8_and_the_others_that_of_bfloat16() -> None:
    """8B: 13.95 of 17.19 GFLOP of a token's forward pass are the matrices of the layers."""
    gpu, plain = GPUS["H100"], segment()
    eighth = segment(precision=Precision(linear="float8"))
    once = flops.forward(plain.model, plain.sequence_length)
    layers = once.projections / (once.projections + once.scores + once.output)
    assert layers == pytest.approx(13.95 / 17.19, abs=1e-3)
    assert flops.peak(plain, gpu) == gpu.bf16_flops
    assert flops.peak(eighth, gpu) == pytest.approx(989.5e12 / (layers / 2 + 1 - layers))
    cluster = Cluster(gpu="H100")
    ratio = 1 - layers / 2
    seconds = spent(1e20, 1, 0.4, cluster).seconds
    assert seconds is not None
    assert spent(1e20, 1, 0.4, cluster, flops.peak(eighth, gpu)).seconds == pytest.approx(seconds * ratio)
