"""Optimizers of libraries against the update as published, evaluated in float64; states that a checkpoint
can hold."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from apertus_model.optimizers.benchmark import library
from specs.capabilities import OPTIMIZERS
from tests.numerics import Numerics, largest_difference

SHAPE, STEPS, LR, DECAY = (6, 4), 12, 3e-2, 0.1
Tensor = torch.Tensor


def gradient(step: int) -> Tensor:
    return 0.5 + 0.5 * torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def start() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(99))


def trained(make: Callable[[list[dict[str, Any]]], Any], **settings: Any) -> tuple[Tensor, Any]:
    """The weight after `STEPS` steps, and the optimizer."""
    weight = torch.nn.Parameter(start())
    optimizer = make([{"params": [weight], "lr": LR, "weight_decay": DECAY, **settings}])
    for step in range(1, STEPS + 1):
        weight.grad = gradient(step)
        optimizer.step()
    return weight.detach(), optimizer


def lion() -> Iterator[Tensor]:
    w, m = start(), torch.zeros(SHAPE, dtype=torch.float64)
    for t in range(1, STEPS + 1):
        g = gradient(t)
        w = w - LR * (torch.sign(0.9 * m + 0.1 * g) + DECAY * w)
        m = 0.99 * m + 0.01 * g
        yield w


def signum() -> Iterator[Tensor]:
    w, m = start(), torch.zeros(SHAPE, dtype=torch.float64)
    for t in range(1, STEPS + 1):
        m = 0.9 * m + 0.1 * gradient(t)
        w = w - LR * (torch.sign(m) + DECAY * w)
        yield w


def adopt() -> Iterator[Tensor]:
    w, m = start(), torch.zeros(SHAPE, dtype=torch.float64)
    v = gradient(1) ** 2
    w = w - LR * DECAY * w
    for t in range(1, STEPS):  # algorithm 2: step 0 has made v
        g = gradient(t + 1)
        w = w - LR * DECAY * w
        m = 0.9 * m + 0.1 * (g / v.sqrt().clamp(min=1e-6)).clamp(-(t**0.25), t**0.25)
        w = w - LR * m
        v = 0.9999 * v + 0.0001 * g**2
        yield w


def mars() -> Iterator[Tensor]:
    w, m, v, last = start(), *(torch.zeros(SHAPE, dtype=torch.float64) for _ in range(3))
    for t in range(1, STEPS + 1):
        g = gradient(t)
        c = g + 0.025 * 0.95 / 0.05 * (g - last)
        c = c / max(1.0, c.norm().item())
        m = 0.95 * m + 0.05 * c
        v = 0.99 * v + 0.01 * c**2
        w = w - LR * (m / (1 - 0.95**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-8) + DECAY * w)
        last = g
        yield w


def schedule_free() -> Iterator[tuple[Tensor, Tensor]]:
    x, z, v = start(), start(), torch.zeros(SHAPE, dtype=torch.float64)
    for t in range(1, STEPS + 1):
        y = 0.1 * z + 0.9 * x
        g = gradient(t)
        v = 0.999 * v + 0.001 * g**2
        z = z - LR * (g / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + DECAY * y)
        x = (1 - 1 / t) * x + z / t  # the rate is constant, so are the weights of the average
        yield x, 0.1 * z + 0.9 * x


def prodigy() -> Iterator[Tensor]:
    w, m, v, s = start(), *(torch.zeros(SHAPE, dtype=torch.float64) for _ in range(3))
    first, d, r = w, 1e-6, 0.0
    for t in range(1, STEPS + 1):
        g, root = gradient(t), 0.999**0.5
        r = root * r + (1 - root) * d * d * (g * (first - w)).sum().item()
        s = root * s + (1 - root) * d * d * g
        m = 0.9 * m + 0.1 * d * g
        v = 0.999 * v + 0.001 * d**2 * g**2
        grown = max(d, r / s.abs().sum().item())
        w = w - d * (m / (v.sqrt() + grown * 1e-8) + DECAY * w)
        d = grown
        yield w


FORMULAS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[], Iterator[Tensor]]]] = {
    "lion": (library.lion, {"betas": (0.9, 0.99)}, lion),
    "signum": (library.signum, {"momentum": 0.9}, signum),
    "adopt": (
        library.adopt,
        {"betas": (0.9, 0.9999), "eps": 1e-6, "weight_decouple": True, "foreach": False},
        adopt,
    ),
    "mars": (library.mars, {"betas": (0.95, 0.99), "gamma": 0.025, "eps": 1e-8, "foreach": False}, mars),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_library_follows_the_published_update(name: str, numerics: Numerics) -> None:
    make, settings, formula = FORMULAS[name]
    found, _ = trained(make, **settings)
    *_, expected = formula()
    # MARS of the library adds 1e-15 inside of the root, and eps before the bias correction, where its authors
    # add it afterwards.
    numerics(
        "optimizers",
        f"{name}, weights after {STEPS} steps, float64",
        source=OPTIMIZERS[name].source,
        against="the published update in float64",
        difference=largest_difference(found, expected),
        allowed=1e-5 if name == "mars" else 1e-9,
    )


def test_prodigy_follows_the_published_update(numerics: Numerics) -> None:
    found, optimizer = trained(library.prodigy, lr=1.0, betas=(0.9, 0.999), eps=1e-8)
    *_, expected = prodigy()
    assert optimizer.param_groups[0]["d"] > 1e-6  # the estimate has begun to grow
    numerics(
        "optimizers",
        f"prodigy, way of the weights in {STEPS} steps, float64 with sums in float32, relative above 1e-7",
        source="arXiv 2306.06101, konstmish/prodigy",
        against="the published update in float64",
        difference=largest_difference(found - start(), expected - start(), relative_above=1e-7),
        allowed=1e-5,
    )


def test_schedule_free_trains_one_point_and_averages_another(numerics: Numerics) -> None:
    found, optimizer = trained(library.schedule_free_adamw, betas=(0.9, 0.999), eps=1e-8)
    *_, (average, training) = schedule_free()
    (weight,) = optimizer.param_groups[0]["params"]
    found = found.clone()  # of the weight, which changes here
    with optimizer.averaged():
        numerics(
            "optimizers",
            f"schedule-free-adamw, trained weights and their average after {STEPS} steps, float64",
            source=OPTIMIZERS["schedule-free-adamw"].source,
            against="the published update in float64",
            difference=largest_difference([found, weight], [training, average]),
            allowed=1e-9,
        )
    assert torch.equal(weight.detach(), found)


def test_soap_without_rotation_is_adam_one_step_late(numerics: Numerics) -> None:
    """A matrix whose dimensions are too large to be preconditioned has no eigenbases: what is left is Adam
    from the second gradient on."""
    found, _ = trained(library.soap, betas=(0.9, 0.95), eps=1e-8, max_precondition_dim=1)
    w, m, v = start(), *(torch.zeros(SHAPE, dtype=torch.float64) for _ in range(2))
    for t in range(1, STEPS):
        g = gradient(t + 1)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        w = w - LR * m / (1 - 0.9**t) / (v.sqrt() + 1e-8) * (1 - 0.95**t) ** 0.5
        w = w - LR * DECAY * w
    numerics(
        "optimizers",
        f"soap without eigenbases, weights after {STEPS} steps, float64",
        source=OPTIMIZERS["soap"].source,
        against="Adam from the second gradient on, in float64",
        difference=largest_difference(found, w),
        allowed=1e-9,
    )


def test_soap_first_rotates_into_the_eigenvectors_of_the_first_gradient(numerics: Numerics) -> None:
    weight = torch.nn.Parameter(start()[:4])
    optimizer = library.soap(
        [{"params": [weight], "lr": LR, "weight_decay": 0.0, "betas": (0.95, 0.95), "eps": 0.0}]
    )
    first, second = gradient(1)[:4], gradient(2)[:4]
    for g in (first, second):
        weight.grad = g.clone()
        optimizer.step()
    left, right = (torch.linalg.eigh(product)[1] for product in (first @ first.T, first.T @ first))
    step = left @ torch.sign(left.T @ second @ right) @ right.T  # Adam's first step has the size of the rate
    numerics(
        "optimizers",
        "soap, weights after its first step in eigenbases, float64",
        source=OPTIMIZERS["soap"].source,
        against="the step in the eigenvectors of torch.linalg.eigh, float64",
        difference=largest_difference(weight, start()[:4] - LR * step),
        allowed=1e-7,
    )


@pytest.mark.parametrize(
    "name", ["adopt", "lion", "signum", "soap", "prodigy", "schedule_free_adamw", "mars"]
)
def test_numbers_that_a_library_keeps_in_parameter_groups_are_saved_and_restored(name: str) -> None:
    make = getattr(library, name)
    settings = {"momentum": 0.9} if name == "signum" else {"betas": (0.9, 0.99)}
    _, optimizer = trained(make, **settings)
    fresh = make([{"params": [torch.nn.Parameter(start())], "lr": LR, "weight_decay": DECAY, **settings}])
    assert not fresh.begun and optimizer.begun
    fresh.set_counters(optimizer.counters())
    assert fresh.begun
    assert fresh.counters() == optimizer.counters() != dict(fresh.COUNTERS)


@pytest.mark.slow
def test_the_library_is_not_imported_before_it_is_asked_for() -> None:
    import subprocess
    import sys

    code = "import sys, apertus_model.trainer.optimizer as o; assert 'pytorch_optimizer' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
