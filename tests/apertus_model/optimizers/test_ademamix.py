"""AdEMAMix against the formula of the recipe in float64 and against torch's AdamW; its kernel, its shards,
its bfloat16 moments."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from apertus_model.optimizers import ademamix
from apertus_model.optimizers.ademamix import MOMENTS, AdEMAMix, scheduled_alpha, scheduled_beta3
from tests.apertus_model.ranks import in_processes
from tests.numerics import Numerics, largest_difference


@pytest.mark.parametrize(
    ("step", "beta3", "alpha"),
    [(1, 0.900988, 0.00008), (1_000, 0.990901, 0.08), (10_000, 0.999009, 0.8), (50_000, 0.999800, 4.0)],
)
def test_warmups_pass_through_the_published_points(step: int, beta3: float, alpha: float) -> None:
    assert scheduled_beta3(step, 0.9, 0.9999, 100_000) == pytest.approx(beta3, abs=5e-7)
    assert scheduled_alpha(step, 8.0, 100_000) == pytest.approx(alpha)


def test_warmups_end_at_their_targets() -> None:
    for step in (100_000, 100_001, 10**7):
        assert scheduled_beta3(step, 0.9, 0.9999, 100_000) == 0.9999
        assert scheduled_alpha(step, 8.0, 100_000) == 8.0


def gradients(step: int) -> torch.Tensor:
    return torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_follows_the_formula_in_float64_over_a_thousand_steps(
    dtype: torch.dtype, tolerance: float, numerics: Numerics
) -> None:
    b1, b2, b3, alpha, warm_a, warm_b = 0.9, 0.99, 0.999, 5.0, 400, 600
    weight = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    parameter = torch.nn.Parameter(weight.to(dtype))
    optimizer = AdEMAMix(
        [parameter], betas=(b1, b2, b3), alpha=alpha, alpha_warmup=warm_a, beta3_warmup=warm_b,
        weight_decay=0.1,
    )  # fmt: skip
    m1, m2, v = (torch.zeros_like(weight) for _ in range(3))

    def f(beta: float) -> float:
        return math.log(0.5) / math.log(beta + 1e-8) - 1

    for t in range(1, 1001):
        g, lr = gradients(t), 1e-2 / t**0.5
        r = min(1.0, t / warm_b)
        beta3_t = 0.5 ** (1 / ((1 - r) * f(b1) + r * f(b3) + 1)) if r < 1 else b3
        m1 = b1 * m1 + (1 - b1) * g
        m2 = beta3_t * m2 + (1 - beta3_t) * g
        v = b2 * v + (1 - b2) * g**2
        mixed = m1 / (1 - b1**t) + alpha * min(1.0, t / warm_a) * m2
        weight = weight - lr * (mixed / (v.sqrt() / math.sqrt(1 - b2**t) + 1e-8) + 0.1 * weight)
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = g.to(dtype)
        optimizer.step()
    numerics(
        "optimizers",
        f"ademamix, weights after 1,000 steps, {str(dtype).removeprefix('torch.')}",
        source="arXiv 2409.03137, algorithm 1 and its schedulers",
        against="the formula in float64, warm-ups of 400 and 600 steps",
        difference=largest_difference(parameter, weight),
        allowed=tolerance,
    )


def test_without_the_slow_average_it_is_adamw_bit_by_bit(numerics: Numerics) -> None:
    start = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    a = AdEMAMix([ours], lr=3e-3, betas=(0.9, 0.99, 0.999), alpha=0.0, weight_decay=0.1)
    b = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, foreach=True)
    for t in range(50):
        ours.grad = theirs.grad = gradients(t).float()
        a.step()
        b.step()
    numerics(
        "optimizers",
        "ademamix with alpha 0, weights after 50 steps",
        source="arXiv 1711.05101",
        against="torch.optim.AdamW, foreach",
        difference=largest_difference(ours, theirs),
        allowed=0.0,
    )


def test_many_parameters_at_once_give_the_same_bits_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(ademamix, "_chunks", lambda named: [[one] for one in named])
        parameters = [torch.nn.Parameter(torch.ones(size)) for size in (3, 5, 1)]
        optimizer = AdEMAMix(parameters, lr=1e-2, alpha_warmup=10, beta3_warmup=10)
        for t in range(15):
            for index, parameter in enumerate(parameters):
                generator = torch.Generator().manual_seed(100 * t + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        results.append(torch.cat([parameter.detach() for parameter in parameters]))
    assert torch.equal(*results)


def test_a_parameter_without_gradient_keeps_its_own_step_count() -> None:
    busy, idle = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = AdEMAMix([busy, idle])
    for t in range(4):
        busy.grad = torch.ones(2)
        idle.grad = torch.ones(2) if t == 3 else None
        optimizer.step()
    assert optimizer.state[busy]["step"].item() == 4
    assert optimizer.state[idle]["step"].item() == 1


def noisy_quadratic(state_dtype: torch.dtype) -> tuple[float, AdEMAMix]:
    """Mean loss over the last steps on a quadratic with curvatures from 0.01 to 1 and noisy gradients."""
    generator = torch.Generator().manual_seed(1)
    curvature = torch.logspace(-2, 0, 1024)
    weight = torch.nn.Parameter(torch.randn(1024, generator=generator))
    steps = 1500
    optimizer = AdEMAMix(
        [weight],
        betas=(0.9, 0.999, 0.9999),
        alpha=8.0,
        alpha_warmup=steps,
        beta3_warmup=steps,
        state_dtype=state_dtype,
    )
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 6e-3 * (1 - step / steps)
        weight.grad = curvature * weight.detach() + 0.3 * torch.randn(1024, generator=generator)
        optimizer.step()
        losses.append(0.5 * (curvature * weight.detach() ** 2).sum().item())
    return sum(losses[-100:]) / 100, optimizer


def test_training_with_bfloat16_moments_ends_where_it_ends_with_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact, _ = noisy_quadratic(torch.float32)
    rounded, optimizer = noisy_quadratic(torch.bfloat16)
    (state,) = optimizer.state.values()
    assert {state[name].dtype for name in MOMENTS} == {torch.bfloat16}
    monkeypatch.setattr(ademamix, "round_stochastically", lambda values, *place: values.bfloat16())
    to_nearest, _ = noisy_quadratic(torch.bfloat16)
    assert rounded == pytest.approx(exact, rel=0.02)
    assert to_nearest > 1.5 * exact  # updates of the slow average and of the squares are lost


# Shards and the kernel

SHAPES = [(7, 6), (6,), (3, 8), (1,)]


def test_sharded_parameters_get_the_bits_of_whole_ones(tmp_path: Path, numerics: Numerics) -> None:
    def trained(
        state_dtype: torch.dtype, placements: list[Shard | Replicate] | None, shape: tuple[int, ...]
    ) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", shape) if placements else None
        generator = torch.Generator().manual_seed(0)

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            if mesh is None:
                return tensor
            here = [
                where if not isinstance(where, Shard) or where.dim < tensor.ndim else Replicate()
                for where in placements or []
            ]
            return distribute_tensor(tensor, mesh, here)

        parameters = [torch.nn.Parameter(placed(torch.randn(shape, generator=generator))) for shape in SHAPES]
        optimizer = AdEMAMix(
            parameters, alpha_warmup=5, beta3_warmup=5, weight_decay=0.1, state_dtype=state_dtype
        )
        for _ in range(10):
            for parameter in parameters:
                parameter.grad = placed(torch.randn(parameter.shape, generator=generator))
            optimizer.step()
        tensors = [parameter.detach() for parameter in parameters]
        tensors += [optimizer.state[parameter][name] for parameter in parameters for name in MOMENTS]
        return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def work(rank: int) -> float:
        dist.init_process_group("gloo")
        differences = []
        layouts = [((2,), [Shard(0)]), ((2,), [Shard(1)]), ((2, 1), [Replicate(), Shard(0)])]
        for dtype in (torch.float32, torch.bfloat16):
            whole = trained(dtype, None, ())
            for shape, placements in layouts:
                differences.append(largest_difference(trained(dtype, placements, shape), whole))
        assert len(differences) == 6
        return max(differences)

    numerics(
        "optimizers",
        "ademamix on two processes (Shard(0), Shard(1), replicas), weights and moments after 10 steps,"
        " moments in float32 and bfloat16",
        source="arXiv 2409.03137",
        against="whole matrices in one process",
        difference=max(in_processes(tmp_path, work, 2)),
        allowed=0.0,
    )
