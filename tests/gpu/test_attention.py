"""Every attention backend, forward and backward, against the formula in float64."""

import math
from pathlib import Path

import pytest
import torch

from apertus_model.device import has_gpu
from apertus_model.model.attention_choice import (
    BACKENDS,
    AttentionBackendError,
    Choice,
    Setting,
    resolve_backend,
)
from apertus_model.model.model import model_config
from specs.model import ModelSpec
from tests.gpu.conftest import Measured, NotApplicable, in_one_process

LENGTH, HEADS, KV_HEADS = 512, 8, 2
DOCUMENTS = [[200, 1, 311], [512]]
ALLOWED = 0.03  # bfloat16 has steps of 2^-8; gradients add four heads in it


def positions() -> torch.Tensor:
    return torch.tensor([[place for length in row for place in range(length)] for row in DOCUMENTS])


def attend_by_formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k / sqrt(head dim)) v over earlier places of the same document, in the dtype of the inputs;
    tensors (batch, length, heads, head dim)."""
    document = (positions() == 0).cumsum(1).to(q.device)
    place = torch.arange(LENGTH, device=q.device)
    seen = (document[:, :, None] == document[:, None, :]) & (place[:, None] >= place[None, :])
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
    scores = torch.einsum("binh,bjnh->bnij", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("bnij,bjnh->binh", weights, v)


def difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest of all tokens, relative to the token's norm and the mean norm."""
    norms = exact.flatten(2).norm(dim=-1)
    return float(((found - exact).flatten(2).norm(dim=-1) / (norms + norms.mean())).max())


def differences(backend: str, head_dim: int) -> tuple[list[float], list[float]]:
    """Differences of output and gradients from the formula in float64: of the backend in bfloat16, and of
    the formula itself in bfloat16."""
    try:
        resolve_backend(backend, Setting("bfloat16", 1, head_dim))
    except AttentionBackendError as error:
        raise NotApplicable(str(error)) from None
    device = "cuda" if has_gpu() else "cpu"
    spec = ModelSpec(
        dim=64, n_layers=1, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=head_dim, ffn_dim=64, vocab_size=128
    )
    model = model_config(spec, sequence_length=LENGTH, attention=backend, seed=1).build().to(device)
    masks = model.get_attention_masks(positions().to(device))
    inner = model.layers["0"].attention.inner_attention
    generator = torch.Generator().manual_seed(head_dim)
    drawn = [
        torch.randn(2, LENGTH, heads, head_dim, generator=generator).bfloat16().to(device)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]

    def computed(attend: object, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in drawn[:3])
        out = attend(q, k, v)  # type: ignore[operator]  # any of the two below
        (out * drawn[3].to(dtype)).sum().backward()
        return [tensor.detach().double() for tensor in (out, q.grad, k.grad, v.grad)]

    def by_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = inner(q, k, v, attention_masks=masks, enable_gqa=True)
        return found

    exact = computed(attend_by_formula, torch.float64)
    found = computed(by_backend, torch.bfloat16)
    rounded = computed(attend_by_formula, torch.bfloat16)
    return tuple(  # type: ignore[return-value]  # two
        [difference(a, b) for a, b in zip(some, exact, strict=True)] for some in (found, rounded)
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_as_near_the_formula_as_bfloat16_allows(
    backend: str, head_dim: int, tmp_path: Path, measured: Measured
) -> None:
    found, rounded = in_one_process(tmp_path, lambda: differences(backend, head_dim))
    for what, of_backend, of_formula in zip(("output", "dq", "dk", "dv"), found, rounded, strict=True):
        measured(what, f"{of_backend:.1e} from float64 (the formula in bfloat16: {of_formula:.1e})")
    assert max(found) < ALLOWED


def test_auto_says_what_it_chose(tmp_path: Path, measured: Measured) -> None:
    def chosen() -> tuple[str, str]:
        choice: Choice = resolve_backend("auto", Setting("bfloat16", 1, head_dim=128))
        return choice.backend, choice.reason

    backend, reason = in_one_process(tmp_path, chosen)
    measured("auto", f"{backend} ({reason})")
    assert backend in BACKENDS and reason
