"""Layers of Mamba-2: transformers' mixer, a state written out token by token, documents, how they begin."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apertus_model.model.mamba import MambaMixer, Recurrence, matrix, scan
from apertus_model.model.model import ApertusModel, model_config
from specs.mamba import OF_DECAYS, OWN
from specs.model import ModelSpec
from tests.numerics import Numerics, largest_difference

SPEC = ModelSpec.model_validate(
    {
        "dim": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 48,
        "vocab_size": 128, "init_std": 0.3, "mamba": {"layers": [2, 0], "chunk": 8},
    }
)  # fmt: skip
LENGTH, BORDER = 20, 13


def build(spec: ModelSpec = SPEC, seed: int = 5) -> ApertusModel:
    model = model_config(spec, sequence_length=LENGTH, attention="sdpa", seed=seed).build()
    model.init_weights()
    return model


def mixer(spec: ModelSpec = SPEC, **changes: Any) -> MambaMixer:
    """The first layer's, in float64, with convolutions and norms that are not the identity."""
    found: MambaMixer = build(spec.model_copy(update=changes)).layers["0"].attention.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "conv" in name or "norm" in name or name == "d":
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return found


def one_document() -> torch.Tensor:
    return torch.arange(LENGTH).expand(2, -1)


def two_documents() -> torch.Tensor:
    """In the first row; the second has one."""
    return torch.stack(
        [torch.cat([torch.arange(BORDER), torch.arange(LENGTH - BORDER)]), torch.arange(LENGTH)]
    )


def states(seed: int = 2) -> torch.Tensor:
    return torch.randn(
        2, LENGTH, SPEC.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def test_a_mixer_is_that_of_transformers_on_one_document(
    numerics: Numerics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many groups as heads, and without the norms of queries and keys, which theirs does not have."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    ours = mixer()
    ours.q_norm = ours.k_norm = nn.Identity()  # type: ignore[assignment]
    heads, width = SPEC.n_heads, SPEC.head_dim
    config = Mamba2Config(
        num_heads=heads, head_dim=width, hidden_size=SPEC.dim, state_size=width, n_groups=heads, expand=2,
        conv_kernel=4, use_conv_bias=False, use_bias=False, chunk_size=8, layer_norm_epsilon=SPEC.norm_eps,
    )  # fmt: skip
    theirs = Mamba2Mixer(config, layer_idx=0).double()

    def of_heads(rows: torch.Tensor) -> torch.Tensor:
        """Rows of key heads, again for each of their query heads."""
        again = heads // SPEC.n_kv_heads
        return rows.unflatten(0, (SPEC.n_kv_heads, width)).repeat_interleave(again, 0).flatten(0, 1)

    qkv = ours.qkv_linear
    with torch.no_grad():
        keys, values = of_heads(qkv.wk.weight), of_heads(qkv.wv.weight)
        rows = [ours.z_proj.weight, values, keys, qkv.wq.weight, ours.dt_proj.weight]
        theirs.in_proj.weight.copy_(torch.cat(rows))
        taps = torch.cat([of_heads(ours.conv_x), of_heads(ours.conv_b), ours.conv_c])
        theirs.conv1d.weight.copy_(taps[:, None])
        for name, parameter in (("A_log", ours.a_log), ("dt_bias", ours.dt_bias), ("D", ours.d)):
            getattr(theirs, name).copy_(parameter)
        theirs.norm.weight.copy_(ours.out_norm)
        theirs.out_proj.weight.copy_(ours.wo.weight)
    results = []
    for run in (lambda u: ours(u, None, one_document()), theirs):
        read = states().requires_grad_()
        found = run(read)
        found.square().sum().backward()
        assert read.grad is not None
        results.append((found, read.grad, ours.a_log.grad if not results else theirs.A_log.grad))
    for own, other in zip(*results, strict=True):
        numerics(
            "model",
            "Mamba-2 mixer: output, gradients of input and decays, relative",
            source="arXiv 2405.21060",
            against="transformers' Mamba2Mixer",
            difference=largest_difference(own, other) / other.abs().max().item(),
            allowed=1e-6,
        )


def by_tokens(of: Recurrence) -> torch.Tensor:
    """The state of every head, token by token."""
    written = []
    for row in range(of.x.shape[0]):
        state = torch.zeros(of.x.shape[2], of.b.shape[3], of.x.shape[3], dtype=of.x.dtype)
        for token in range(of.x.shape[1]):
            if token and of.documents[row, token] != of.documents[row, token - 1]:
                state = torch.zeros_like(state)
            new = of.b[row, token, :, :, None] * of.x[row, token, :, None, :]
            state = of.log_a[row, token].exp()[:, None, None] * state + of.dt[row, token, :, None, None] * new
            written.append((of.c[row, token, :, :, None] * state).sum(1))
    return torch.stack(written).view(of.x.shape)


@pytest.mark.parametrize("chunk", [1, 3, 8, 20, 64])
def test_chunks_are_the_state_token_by_token(chunk: int) -> None:
    of = mixer().recurrence(states(), two_documents())
    exact = by_tokens(of)
    assert largest_difference(scan(of, chunk), exact) < 1e-13 * exact.abs().max().item()
    assert largest_difference(torch.einsum("bhts,bshn->bthn", matrix(of), of.x), exact) < 1e-13


def test_without_decay_it_is_linear_attention() -> None:
    """Sums over the tokens of a document so far (arXiv 2006.16236, equation 9), without their denominator."""
    assert SPEC.mamba is not None
    one = mixer(mamba=SPEC.mamba.model_copy(update={"decay": False}))
    of = one.recurrence(states(), two_documents())
    seen = (of.documents[:, :, None] == of.documents[:, None]).tril().double()
    exact = torch.einsum("bthn,bshn,bts,bshp->bthp", of.c, of.b, seen, of.x)
    assert largest_difference(scan(of, 8), exact) < 1e-13 * exact.abs().max().item()
    assert {name for name, _ in one.named_parameters()}.isdisjoint(OF_DECAYS)


def test_rounding_does_not_grow_with_what_was_forgotten() -> None:
    """In float32, after 500 tokens that decay fast, tokens that are kept: the logarithms of all decays so far
    add up to -7,650, of which a float32 has three digits after the point."""
    length, generator = 540, torch.Generator().manual_seed(4)
    c, b, x = (torch.randn(1, length, 1, 4, generator=generator) for _ in range(3))
    dt = torch.full((1, length, 1), 0.1)
    log_a = torch.where(torch.arange(length) < 500, -15.3, -1e-3)[None, :, None]
    of = Recurrence(c, b, x, dt, log_a, torch.ones(1, length, dtype=torch.int64))
    exact = by_tokens(Recurrence(*(one.double() for one in of[:-1]), of.documents))
    assert (scan(of, 8) - exact).abs().max() < 2e-6 * exact.abs().max()
    assert (torch.einsum("bhts,bshn->bthn", matrix(of), x) - exact).abs().max() < 2e-6 * exact.abs().max()


def test_steps_are_not_multiplied_in_float8() -> None:
    """Which multiplies sizes of multiples of 16 only: a rank's heads are fewer."""
    from torchtitan.models.common import Linear

    class Marked(Linear.Config):
        """In the place of float8."""

    config = model_config(SPEC, sequence_length=LENGTH, attention="sdpa", linear_config=Marked)
    mixing = config.layers[0].attention
    assert isinstance(mixing.qkv_linear.wq, Marked) and isinstance(mixing.z_proj, Marked)
    assert type(mixing.dt_proj) is Linear.Config and mixing.dt_proj.out_features == SPEC.n_heads


def test_documents_of_a_row_are_mixed_like_documents_alone() -> None:
    """Also where the row begins inside of a document."""
    one, first = mixer(), states()[:1]
    packed = one(states(), None, two_documents())[:1]
    for begin, end in ((0, BORDER), (BORDER, LENGTH)):
        alone = one(first[:, begin:end], None, torch.arange(end - begin)[None])
        assert largest_difference(packed[:, begin:end], alone) < 1e-13
    borders = two_documents()[:1]
    borders[:, :BORDER] += 3  # of a document that has begun in an earlier row
    assert largest_difference(one(first, None, borders), packed) < 1e-14


@pytest.mark.parametrize("layers", [[0, 2], "all"])
def test_no_token_sees_a_later_one_or_another_document(layers: Any) -> None:
    model = build(ModelSpec.model_validate({**SPEC.model_dump(), "mamba": {"layers": layers, "chunk": 8}}))
    tokens = torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(3))

    def logits(changed: int | None = None) -> torch.Tensor:
        read = tokens.clone()
        if changed is not None:
            read[:, changed] = (read[:, changed] + 1) % 128
        with torch.no_grad():
            found: torch.Tensor = model(read, two_documents())
        return found

    before, later, other = logits(), logits(changed=15), logits(changed=5)
    assert torch.equal(later[:, :15], before[:, :15]) and (later[:, 15:] != before[:, 15:]).any(-1).all()
    assert torch.equal(other[0, BORDER:], before[0, BORDER:])
    assert ((other - before)[0, 5:BORDER].abs().amax(-1) > 1e-3).all()
    assert (other[1, 5:] != before[1, 5:]).any(-1).all()


def test_a_new_model_has_the_weights_of_attention_and_steps_and_decays_as_drawn() -> None:
    plain, model = build(SPEC.model_copy(update={"mamba": None})).state_dict(), build().state_dict()
    assert model.keys() - plain.keys() == {
        f"layers.{layer}.attention.{name}" for layer in (0, 2) for name in OWN
    }
    assert all(torch.equal(model[name], weight) for name, weight in plain.items())
    many = ModelSpec.model_validate({**SPEC.model_dump(), "n_heads": 512, "n_kv_heads": 2, "head_dim": 2})
    wide = build(many)
    drawn = wide.layers["0"].attention
    steps, decays = F.softplus(drawn.dt_bias), drawn.a_log.exp()
    assert 1e-3 <= steps.min() < 1.3e-3 and 0.08 < steps.max() <= 0.1
    assert steps.log().mean().item() == pytest.approx((math.log(1e-3) + math.log(0.1)) / 2, abs=0.2)
    assert 1 <= decays.min() < 1.2 and 15.8 < decays.max() <= 16 and abs(decays.mean() - 8.5) < 0.6
    assert torch.equal(drawn.conv_x, torch.tensor([0.0, 0, 0, 1]).expand(4, -1))
    assert not torch.equal(drawn.a_log, wide.layers["2"].attention.a_log)
    assert torch.equal(drawn.a_log, build(many).layers["0"].attention.a_log)
    assert not torch.equal(drawn.a_log, build(many, seed=6).layers["0"].attention.a_log)
