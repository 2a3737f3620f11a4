"""The project's own kernels: equal to what they replace, and as fast as the memory."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from apertus_model.losses.cross_entropy import LastStates, cross_entropy
from apertus_model.losses.softmax import row_sums, to_gradient
from apertus_model.model.feed_forward import XIELU
from apertus_model.model.rotation import rotate
from apertus_model.model.xielu import BETA
from apertus_model.optimizers.ademamix import AdEMAMix
from apertus_model.rehearsal.rates import SHEETS
from tests.apertus_model.model.formulas import rotated_in_float64, table
from tests.gpu.conftest import Measured, in_one_process, needs_gpus, seconds_of, sheet_of_this_gpu

ELEMENTS = 2**27
LR, STEPS = 1e-2, 8
QUEUED = 10  # kernels of a tenth of a millisecond or two


def ademamix(fused: bool, states: torch.dtype, elements: int) -> AdEMAMix:
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(elements, generator=generator, device="cuda"))
    weight.grad = torch.randn(elements, generator=generator, device="cuda")
    return AdEMAMix([weight], lr=LR, weight_decay=0.1, fused=fused, state_dtype=states)


@needs_gpus()
@pytest.mark.parametrize(("states", "rounded_otherwise"), [(torch.float32, 0.0), (torch.bfloat16, 1e-3)])
def test_ademamix_computes_what_foreach_does(
    states: torch.dtype, rounded_otherwise: float, tmp_path: Path, measured: Measured
) -> None:
    """Weights differ by roundings of float32, one for each step. Of bfloat16 moments, the last bits of
    float32 say which of two neighbours a moment is rounded to: where these bits differ, some are rounded
    otherwise, and their weight then moves by another 2^-8 of the step."""

    def differences() -> tuple[float, float]:
        optimizers = [ademamix(fused, states, 2**20 + 3) for fused in (True, False)]
        for _ in range(STEPS):
            for optimizer in optimizers:
                optimizer.step()
        kernel, foreach = (optimizer.param_groups[0]["params"][0] for optimizer in optimizers)
        found = (kernel - foreach).abs()
        beyond = found > STEPS * torch.finfo(torch.float32).eps * foreach.abs().clamp(min=1)
        return float(found.max()), float(beyond.float().mean())

    largest, beyond = in_one_process(tmp_path, differences)
    measured(f"largest difference after {STEPS} steps", f"{largest:.1e}")
    measured("weights beyond the rounding of float32", f"{beyond:.1e}")
    assert beyond <= rounded_otherwise
    assert largest < LR / 10


@needs_gpus()
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_ademamix_is_as_fast_as_the_memory(states: torch.dtype, tmp_path: Path, measured: Measured) -> None:
    name = sheet_of_this_gpu()

    def seconds() -> tuple[float, float]:
        fused, foreach = (seconds_of(ademamix(kind, states, ELEMENTS).step) for kind in (True, False))
        return fused, foreach

    fused, foreach = in_one_process(tmp_path, seconds)
    per_element = 2 * 4 + 4 + 3 * 2 * states.itemsize  # weight, gradient, three moments
    share = ELEMENTS * per_element / fused / SHEETS[name].bandwidth
    measured("bandwidth", f"{share:.0%} of the sheet of {name}")
    measured("times as fast as foreach", f"{foreach / fused:.2f}")
    assert share > 0.6


def activation(dtype: torch.dtype) -> XIELU:
    layer: XIELU = XIELU.Config().build().to("cuda", dtype)
    torch.nn.init.constant_(layer.alpha_p, 0.7)
    torch.nn.init.constant_(layer.alpha_n, -0.3)
    return layer


def published(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
    """xIELU of arXiv 2411.13010."""
    slope_p, slope_n = F.softplus(alpha_p), BETA + F.softplus(alpha_n)
    below = x.clamp(max=0)
    return torch.where(x > 0, slope_p * x * x, slope_n * (torch.expm1(below) - below)) + BETA * x


@needs_gpus()
def test_xielu_computes_the_formula(tmp_path: Path, measured: Measured) -> None:
    def differences() -> list[float]:
        layer = activation(torch.float32)
        generator = torch.Generator("cuda").manual_seed(0)
        x, gradient = (torch.randn(2**20 + 3, generator=generator, device="cuda") for _ in range(2))
        x.requires_grad_()
        exact = [tensor.detach().double().requires_grad_() for tensor in (x, layer.alpha_p, layer.alpha_n)]
        found, expected = layer(x), published(*exact)
        found.backward(gradient)
        expected.backward(gradient.double())
        pairs = [
            (found, expected),
            *zip((x.grad, layer.alpha_p.grad, layer.alpha_n.grad), (one.grad for one in exact), strict=True),
        ]
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    found = in_one_process(tmp_path, differences)
    for what, difference in zip(("value", "dx", "dalpha_p", "dalpha_n"), found, strict=True):
        measured(what, f"{difference:.1e} from float64, relative")
    assert max(found) < 1e-4


@needs_gpus()
def test_xielu_is_as_fast_as_the_memory(tmp_path: Path, measured: Measured) -> None:
    name = sheet_of_this_gpu()

    def seconds() -> tuple[float, float]:
        layer = activation(torch.bfloat16)
        x = torch.randn(ELEMENTS, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out = layer(x)
        with torch.no_grad():
            forward = seconds_of(lambda: layer(x), queued=QUEUED)
        return forward, seconds_of(lambda: torch.autograd.grad(out, x, x, retain_graph=True), queued=QUEUED)

    forward, backward = in_one_process(tmp_path, seconds)
    shares = [
        2 * passes * ELEMENTS / spent / SHEETS[name].bandwidth
        for passes, spent in ((2, forward), (3, backward))
    ]
    measured("bandwidth forward and backward", f"{shares[0]:.0%} and {shares[1]:.0%} of the sheet of {name}")
    assert min(shares) > 0.6


@needs_gpus()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotary_embedding_computes_the_formula(
    dtype: torch.dtype, tmp_path: Path, measured: Measured
) -> None:
    """Heads of 96 elements, half of which is no power of two."""

    def differences() -> list[float]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 511, 5, 96, generator=generator).to("cuda", dtype).requires_grad_()
        rows = table(2, 511, 48, generator).to("cuda")
        found = rotate(x, rows, False)
        (gradient,) = torch.autograd.grad(found, x, x)
        values = x.detach()
        pairs = [
            (found.detach(), rotated_in_float64(values, rows, False)),
            (gradient, rotated_in_float64(values, rows, True)),
        ]
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    found = in_one_process(tmp_path, differences)
    for what, difference in zip(("value", "dx"), found, strict=True):
        measured(what, f"{difference:.1e} from float64, relative")
    assert max(found) < (1e-6 if dtype == torch.float32 else 4e-3)  # bfloat16 has steps of 2^-8


@needs_gpus()
def test_the_rotary_embedding_is_as_fast_as_the_memory(tmp_path: Path, measured: Measured) -> None:
    name = sheet_of_this_gpu()

    def seconds() -> float:
        x = torch.randn(8, 4096, ELEMENTS // (8 * 4096 * 128), 128, dtype=torch.bfloat16, device="cuda")
        rows = table(1, 4096, 64).to("cuda")
        return seconds_of(lambda: rotate(x, rows, False), queued=QUEUED)

    share = 2 * 2 * ELEMENTS / in_one_process(tmp_path, seconds) / SHEETS[name].bandwidth
    measured("bandwidth", f"{share:.0%} of the sheet of {name}")
    assert share > 0.6


@needs_gpus()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_that_of_all_logits(dtype: torch.dtype, tmp_path: Path, measured: Measured) -> None:
    """And its gradients; a chunk and a part of one, and words that fill no block."""

    def differences() -> list[float]:
        generator = torch.Generator("cuda").manual_seed(0)
        states = torch.randn(1, 1500, 64, generator=generator, device="cuda").to(dtype).requires_grad_()
        weight = torch.randn(5003, 64, generator=generator, device="cuda").to(dtype).requires_grad_()
        labels = torch.randint(5003, (1, 1500), generator=generator, device="cuda")
        exact = [tensor.detach().double().requires_grad_() for tensor in (states, weight)]
        found = cross_entropy(LastStates(states, weight, labels), 1500.0)
        expected = F.cross_entropy(F.linear(*exact)[0], labels[0])
        gradients = torch.autograd.grad(found, (states, weight)), torch.autograd.grad(expected, exact)
        pairs = [(found.detach(), expected.detach()), *zip(*gradients, strict=True)]
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    found = in_one_process(tmp_path, differences)
    for what, difference in zip(("loss", "dstates", "dweight"), found, strict=True):
        measured(what, f"{difference:.1e} from float64, relative")
    assert max(found) < (1e-5 if dtype == torch.float32 else 3e-2)  # logits near 8 have steps of 2^-5


@needs_gpus()
def test_the_softmax_is_as_fast_as_the_memory(tmp_path: Path, measured: Measured) -> None:
    name = sheet_of_this_gpu()

    def seconds() -> tuple[float, float]:
        logits = torch.zeros(1024, ELEMENTS // 1024, dtype=torch.bfloat16, device="cuda")
        labels, zeros = torch.zeros(1024, dtype=torch.int64, device="cuda"), torch.zeros(1024, device="cuda")
        return (
            seconds_of(lambda: row_sums(logits), queued=QUEUED),
            seconds_of(lambda: to_gradient(logits, labels, *[zeros] * 3), queued=QUEUED),
        )

    spent = in_one_process(tmp_path, seconds)
    shares = [2 * n * ELEMENTS / s / SHEETS[name].bandwidth for n, s in zip((1, 2), spent, strict=True)]
    measured("bandwidth of sums and gradient", f"{shares[0]:.0%} and {shares[1]:.0%} of the sheet of {name}")
    assert min(shares) > 0.6
