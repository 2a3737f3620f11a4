"""Layers in the order of a schedule: the plain stack at initialisation, and the formula afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apertus_model.model.attention import document_mask
from apertus_model.model.layer_schedule import WeightedSum
from apertus_model.model.model import ApertusModel, model_config
from specs.layer_schedule import DepthAverage, LayerPairs
from specs.model import ModelSpec
from tests.numerics import largest_difference

PLAIN = ModelSpec(
    dim=48, n_layers=6, n_heads=6, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=256, init_std=0.3
)
METHODS: dict[str, dict[str, Any]] = {
    "all states": {},
    "dilation 2, period 3": {"dilation": 2, "period": 3},
    "over a layer": {"over": "layer", "period": 2},
}
LENGTH = 32


def scheduled(name: str) -> ModelSpec:
    return PLAIN.model_copy(update={"depth_average": DepthAverage(**METHODS[name])})


def build(spec: ModelSpec) -> ApertusModel:
    model = model_config(spec, sequence_length=LENGTH, attention="sdpa", seed=5).build()
    model.init_weights()
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, PLAIN.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def randomised(model: ApertusModel) -> ApertusModel:
    """With other weights of the sums than those that select."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in model.schedule.sums.values():
            one.weight.normal_(generator=generator)
    return model


@pytest.mark.parametrize("name", METHODS)
def test_a_new_model_is_the_plain_one_bit_for_bit_and_every_weight_of_its_sums_has_a_gradient(
    name: str,
) -> None:
    plain, model = build(PLAIN), build(scheduled(name))
    results = []
    for one in (plain, model):
        logits = one(tokens())
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens().flatten()).backward()
        results.append((logits, {key: value.grad for key, value in one.named_parameters()}))
    (logits, expected), (same, found) = results
    assert torch.equal(logits, same)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    own = found.keys() - expected.keys()
    assert len(own) == len(model.schedule.sums)
    assert all((found[key] != 0).all() for key in own)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_passed_on_is_the_weighted_sum_of_the_states(name: str) -> None:
    """The depth-weighted average in float64: Y_i = sum_j a_ij X_j; and the gains of its control, Y_i = a
    Y_(i-1) + b X_i."""
    model = randomised(build(scheduled(name)).double())
    settings = METHODS[name]
    dilation, period, gains = settings.get("dilation", 1), settings.get("period", 1), "over" in settings
    positions = torch.arange(LENGTH).expand(2, -1)
    mask = document_mask(positions)
    with torch.no_grad():
        read = model.tok_embeddings(tokens())
        outputs = [read]
        for i in range(1, PLAIN.n_layers + 1):
            outputs.append(model.layers[str(i - 1)](read, mask, positions))
            if i % period:
                read = outputs[i]
                continue
            weight = model.schedule.sums[str(i)].weight
            chosen = [j for j in range(i + 1) if (i - j) % dilation == 0]
            terms = [read, outputs[i]] if gains else [outputs[j] for j in chosen]
            assert len(weight) == len(terms)
            read = torch.einsum("s,sbld->bld", weight, torch.stack(terms))
        expected = model.lm_head(model.norm(read))
        found = model(tokens())
    assert largest_difference(found, expected) < 1e-12 * expected.abs().max().item()


def test_the_gradients_of_a_sum_are_those_of_its_formula() -> None:
    one = WeightedSum.Config(states=3).build().double()
    torch.nn.init.normal_(one.weight)
    states = [torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *given: one(*given[1:]), (one.weight, *states))


def test_many_states_in_bfloat16_are_added_in_float32_and_rounded_once() -> None:
    one = WeightedSum.Config(states=50).build().bfloat16()
    torch.nn.init.normal_(one.weight)
    states = [torch.randn(4, 8, 16, dtype=torch.bfloat16) for _ in range(50)]
    exact = sum(weight.double() * state.double() for weight, state in zip(one.weight, states, strict=True))
    found = one(*states).detach()
    assert found.dtype == torch.bfloat16
    # one rounding moves a number by half of the distance to its neighbour
    assert (found.double() - exact).abs().le(2**-8 * exact.abs() + 1e-4).all()
    assert not found.double().sub(exact).eq(0).all()


def test_frozen_weights_of_a_sum_get_no_gradient_and_the_states_do() -> None:
    one = WeightedSum.Config(states=2).build()
    torch.nn.init.ones_(one.weight)
    one.weight.requires_grad_(False)
    states = [torch.ones(1, 2, 3, requires_grad=True) for _ in range(2)]
    one(*states).sum().backward()
    assert one.weight.grad is None and all(
        state.grad is not None and (state.grad == 1).all() for state in states
    )


def test_a_later_token_changes_no_earlier_logit_with_sums() -> None:
    model = randomised(build(scheduled("all states"))).eval()
    original = tokens()
    changed = original.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % PLAIN.vocab_size
    with torch.no_grad():
        before, after = model(original), model(changed)
    assert torch.equal(before[:, :20], after[:, :20]) and not torch.equal(before[:, 20:], after[:, 20:])


def paired(**fields: Any) -> ModelSpec:
    return PLAIN.model_copy(update={"layer_pairs": LayerPairs(**fields)})


@pytest.mark.parametrize(
    ("form", "steps"),
    [("paired", [("1", "2"), ("3", "4")]), ("parallel", [("1", "2", "3", "4")])],
)
def test_layers_of_one_step_add_to_the_same_states(form: str, steps: list[tuple[str, ...]]) -> None:
    """The formula, with the modules of the plain model in float64."""
    plain, model = build(PLAIN).double(), build(paired(start=1, layers=4, form=form)).double()
    assert model.state_dict().keys() == plain.state_dict().keys()
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = document_mask(positions)
    with torch.no_grad():
        x = plain.layers["0"](plain.tok_embeddings(tokens()), mask, positions)
        for step in steps:
            blocks = [plain.layers[index] for index in step]
            x = x + sum(block.attention(block.attention_norm(x), mask, positions) for block in blocks)
            x = x + sum(block.feed_forward(block.ffn_norm(x)) for block in blocks)
        expected = plain.lm_head(plain.norm(plain.layers["5"](x, mask, positions)))
        assert largest_difference(model(tokens()), expected) < 1e-12


def test_a_pair_whose_second_layer_adds_nothing_is_the_first_alone() -> None:
    pair = build(paired(start=2, layers=2)).double()
    dropped = build(paired(start=2, layers=2, form="dropped")).double()
    with torch.no_grad():
        for weight in (pair.layers["3"].attention.wo.weight, pair.layers["3"].feed_forward.down_proj.weight):
            weight.zero_()
        assert largest_difference(pair(tokens()), dropped(tokens())) < 1e-12
