"""Layers that run several times see the keys of all passes: the formula, what no token may see, and the
control without old keys."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch._dynamo.config as dynamo
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims

from apertus_model.model.attention import document_mask
from apertus_model.model.model import ApertusModel, model_config
from apertus_model.model.parallelize import compile_layers
from specs.layer_schedule import Repeats
from specs.model import ModelSpec
from tests.machine import slow
from tests.numerics import largest_difference

PLAIN = ModelSpec(
    dim=24, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=128, init_std=0.3,
    rope_theta=100.0, rope_scaling=None, activation="swiglu",
)  # fmt: skip
LENGTH, BORDER = 20, 12


def repeated(**fields: Any) -> ModelSpec:
    return PLAIN.model_copy(update={"repeats": Repeats(start=1, layers=2, times=3, **fields)})


def build(spec: ModelSpec) -> ApertusModel:
    model = model_config(spec, sequence_length=LENGTH, attention="sdpa", seed=5).build()
    model.init_weights()
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, PLAIN.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def positions() -> torch.Tensor:
    """Two documents in the first row, one in the second."""
    first = torch.cat([torch.arange(BORDER), torch.arange(LENGTH - BORDER)])
    return torch.stack([first, torch.arange(LENGTH)])


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + PLAIN.norm_eps).sqrt() * weight


def angles(places: torch.Tensor) -> torch.Tensor:
    """(tokens, head_dim / 2) in float64."""
    half = PLAIN.head_dim // 2
    return places[:, None] * PLAIN.rope_theta ** (-torch.arange(half).double() / half)


def rotated(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, head_dim), of tokens at these places."""
    turned = angles(places)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * turned.cos() - b * turned.sin(), b * turned.cos() + a * turned.sin()], dim=-1)


def interleaved_attention(block: Any, passes: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    """What attention adds in the last of the passes, for one row of tokens: the tokens of all passes are one
    sequence, in which each token is followed by its own later passes."""
    attention, weights = block.attention, block.attention.qkv_linear
    count = len(passes)
    sequence = torch.stack(passes, dim=1).flatten(0, 1)  # token 0 of pass 0, of pass 1, ...; token 1 ...
    token = torch.arange(LENGTH).repeat_interleave(count)
    number = torch.arange(count).repeat(LENGTH)
    document = (places == 0).cumsum(0)[token]
    x = rms(sequence, block.attention_norm.weight)
    heads = (len(sequence), -1, PLAIN.head_dim)
    queries = rotated(rms((x @ weights.wq.weight.T).view(heads), attention.q_norm.weight), places[token])
    keys = rotated(rms((x @ weights.wk.weight.T).view(heads), attention.k_norm.weight), places[token])
    values = (x @ weights.wv.weight.T).view(heads)
    group = PLAIN.n_heads // PLAIN.n_kv_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(PLAIN.head_dim)
    seen = (
        (document[:, None] == document)
        & (token[:, None] >= token)
        & (number[:, None] >= number)
    )  # fmt: skip
    weighed = scores.masked_fill(~seen, -math.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weighed, values).flatten(1) @ attention.wo.weight.T
    return attended[number == count - 1]


def explicit(model: ApertusModel, norm: bool) -> torch.Tensor:
    logits = []
    for row, places in zip(tokens(), positions(), strict=True):
        x = model.tok_embeddings.weight[row]
        x = after(model.layers["0"], [x], places)
        inputs: dict[str, list[torch.Tensor]] = {"1": [], "2": []}
        for _ in range(3):
            for name, read in inputs.items():
                read.append(x)
                x = after(model.layers[name], read, places)
            if norm:
                x = rms(x, model.schedule.norm.weight)
        x = after(model.layers["3"], [x], places)
        logits.append(rms(x, model.norm.weight) @ model.lm_head.weight.T)
    return torch.stack(logits)


def after(block: Any, passes: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    x = passes[-1] + interleaved_attention(block, passes, places)
    return x + block.feed_forward(rms(x, block.ffn_norm.weight))


@pytest.mark.parametrize("norm", [True, slow(False)])
def test_passes_are_attended_to_like_one_interleaved_sequence(
    norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchtitan's operator rotates in float32; this one in float64
    monkeypatch.setattr("apertus_model.model.rotation.has_kernels", lambda _: True)
    model = build(repeated(norm=norm)).double()
    exact_angles = angles(torch.arange(LENGTH))
    table = torch.cat([exact_angles.cos().repeat(1, 2), exact_angles.sin().repeat(1, 2)], dim=-1)
    for block in model.layers.values():
        block.attention.rope.cache = table
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    labels = tokens().roll(-1, 1).flatten()
    results = []
    for logits in (model(tokens(), positions()), explicit(model, norm)):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels).backward()
        gradients = {name: value.grad for name, value in model.named_parameters()}
        results.append((logits.detach(), gradients))
        model.zero_grad()
    (found, gradients), (expected, exact) = results
    assert largest_difference(found, expected) < 1e-12 * expected.abs().max().item()
    for name, gradient in exact.items():
        assert gradient.abs().max() > 0, name
        assert largest_difference(gradients[name], gradient) < 1e-11 * gradient.abs().max().item(), name


@pytest.mark.parametrize("keys", ["all", "own"])
def test_no_token_sees_a_later_one_or_another_document(keys: Any) -> None:
    model = build(repeated(keys=keys))

    def logits(changed: int | None = None) -> torch.Tensor:
        read = tokens()
        if changed is not None:
            read[:, changed] = (read[:, changed] + 1) % PLAIN.vocab_size
        with torch.no_grad():
            found: torch.Tensor = model(read, positions())
        return found

    before = logits()
    later = logits(changed=15)
    assert torch.equal(later[:, :15], before[:, :15])
    assert (later[:, 15:] != before[:, 15:]).any(-1).all()
    other = logits(changed=5)
    assert torch.equal(other[0, BORDER:], before[0, BORDER:])  # the second document
    assert (other[0, 5:BORDER] != before[0, 5:BORDER]).any(-1).all()
    assert (other[1, 5:] != before[1, 5:]).any(-1).all()  # the row of one document


def test_without_old_keys_layers_run_again_as_in_a_deeper_stack() -> None:
    plain, model = build(PLAIN).double(), build(repeated(keys="own", norm=False)).double()
    assert model.state_dict().keys() == plain.state_dict().keys()
    mask = document_mask(positions())
    with torch.no_grad():
        x = plain.tok_embeddings(tokens())
        for layer in "01212123":
            x = plain.layers[layer](x, mask, positions())
        expected = plain.lm_head(plain.norm(x))
        assert largest_difference(model(tokens(), positions()), expected) < 1e-12
        assert largest_difference(build(repeated(norm=False)).double()(tokens(), positions()), expected) > 0.1


def test_a_new_model_has_the_weights_of_the_plain_one_and_a_norm_of_ones() -> None:
    plain, model = build(PLAIN).state_dict(), build(repeated()).state_dict()
    assert model.keys() - plain.keys() == {"schedule.norm.weight"}
    assert (model["schedule.norm.weight"] == 1).all()
    assert all(torch.equal(model[name], weight) for name, weight in plain.items())


@pytest.mark.slow
@dynamo.patch(recompile_limit=dynamo.recompile_limit)
def test_layers_that_see_many_passes_are_compiled() -> None:
    """Twelve graphs, where dynamo's own limit is eight."""
    spec = PLAIN.model_copy(update={"n_layers": 2, "repeats": Repeats(start=1, layers=1, times=5)})
    plain, compiled = build(spec), build(spec)
    config = CompileConfig(enable=True, backend="eager")
    compile_layers(compiled, config, cast(ParallelDims, SimpleNamespace(tp_enabled=False)))
    for model in (plain, compiled):
        model(tokens(), positions()).float().square().mean().backward()
    for (name, weight), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert largest_difference(weight.grad, other.grad) < 1e-6, name
    with torch.no_grad():
        assert largest_difference(plain(tokens(), positions()), compiled(tokens(), positions())) < 1e-5
