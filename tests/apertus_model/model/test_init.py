"""Initial weights: the published distribution, and the same bits on every layout."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from apertus_model.model.init import fill_normal, initialise_parameters
from apertus_model.model.model import ApertusModel, model_config
from specs.launch import Parallel
from specs.model import ModelSpec
from tests.apertus_model.harness import MODEL, segment, train
from tests.machine import slow
from tests.numerics import Numerics, largest_difference

NARROW = ModelSpec(flavour="8b", dim=256, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=1344, vocab_size=1024)
TINY = ModelSpec(
    dim=48, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=256, init_std=0.3
)


def initialised(depth: int) -> ApertusModel:
    """A narrow layer, as it begins in a model of `depth` layers."""
    model = model_config(NARROW, sequence_length=8, attention="sdpa").build()
    initialise_parameters(model, seed=28, std=NARROW.init_std, n_layers=depth)
    return model


def test_published_sizes_begin_with_the_published_standard_deviation() -> None:
    assert ModelSpec(flavour="8b").init_std == ModelSpec(flavour="70b").init_std == 0.008944


# of 8B and 70B, apertus_recipe.md, section 1
@pytest.mark.parametrize(("depth", "output_std"), [(32, 0.001118), (80, 0.000707)])
def test_matrices_begin_normal_and_output_projections_smaller_with_depth(
    depth: int, output_std: float, numerics: Numerics
) -> None:
    model = initialised(depth)
    layer = model.layers["0"]
    outputs = {"attention.wo.weight", "feed_forward.down_proj.weight"}
    exact = 0.008944 / math.sqrt(2 * depth)
    assert output_std == pytest.approx(exact, abs=5e-7)
    for name, weight in [*layer.named_parameters(), *model.named_parameters()]:
        if weight.ndim == 2:
            expected = exact if name.removeprefix("layers.0.") in outputs else 0.008944
            numerics(
                "model",
                f"initial standard deviation 0.008944, of outputs {output_std} ({depth} layers), in standard"
                " errors",
                source="arXiv 2509.14233; outputs: std / sqrt(2 layers)",
                against="the normal distribution, matrix by matrix",
                difference=abs(weight.std().item() / expected - 1) * math.sqrt(2 * weight.numel()),
                allowed=6.0,
            )
            assert abs(weight.mean().item()) < 6 * expected / math.sqrt(weight.numel()), name


def test_the_normal_distribution_is_not_truncated() -> None:
    """Shares outside of one to four standard deviations, against the error function."""
    weight = initialised(32).layers["0"].feed_forward.up_proj.weight / NARROW.init_std
    for bound in (1.0, 2.0, 3.0, 4.0):
        share = (weight.abs() > bound).double().mean().item()
        expected = math.erfc(bound / math.sqrt(2))
        assert share == pytest.approx(expected, abs=6 * math.sqrt(expected / weight.numel())), bound
    assert weight.abs().max().item() > 4


def test_norms_begin_at_one_and_xielu_with_its_published_slopes() -> None:
    for name, parameter in initialised(32).named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith(".alpha_p"):
            assert torch.nn.functional.softplus(parameter.double()).item() == pytest.approx(0.8, abs=1e-7)
        elif name.endswith(".alpha_n"):
            assert 0.5 + torch.nn.functional.softplus(parameter.double()).item() == pytest.approx(
                0.8, abs=1e-7
            )


@pytest.mark.parametrize(
    "layout",
    [slow(Parallel(dp_shard=2)), slow(Parallel(tp=2)), Parallel(dp_shard=2, tp=2)],
    ids=["fsdp", "tp", "fsdp and tp"],
)
def test_every_layout_begins_with_the_bits_of_one_process(
    tmp_path: Path, layout: Parallel, numerics: Numerics
) -> None:
    processes = layout.dp_shard * layout.tp if layout.dp_shard > 0 else layout.tp
    start = train(tmp_path, segment(parallel=layout), processes=processes, stop_at=0)[0]
    alone = model_config(MODEL, sequence_length=16, attention="sdpa", seed=7).build()
    alone.init_weights()
    numerics(
        "parallelism",
        "initial weights, FSDP 2, TP 2 and both",
        source="f(seed, name, element)",
        against="one process",
        difference=largest_difference(start.weights, dict(alone.state_dict())),
        allowed=0.0,
    )


def test_initial_xielu_slopes_are_those_of_the_recipe() -> None:
    model = model_config(TINY, sequence_length=8, attention="sdpa").build()
    model.init_weights()
    activation = model.layers["0"].feed_forward.act
    assert nn.functional.softplus(activation.alpha_p).item() == pytest.approx(0.8)
    assert 0.5 + nn.functional.softplus(activation.alpha_n).item() == pytest.approx(0.8)
    assert activation.alpha_p.item() == pytest.approx(0.20338, abs=1e-5)
    assert activation.alpha_n.item() == pytest.approx(-1.05023, abs=1e-5)


def test_output_projections_start_smaller_than_the_other_matrices() -> None:
    spec = TINY.model_copy(update={"dim": 256, "ffn_dim": 512, "init_std": 0.008944})
    model = model_config(spec, sequence_length=8, attention="sdpa").build()
    model.init_weights()
    layer = model.layers["1"]
    for weight in (layer.attention.wo.weight, layer.feed_forward.down_proj.weight):
        assert weight.std().item() == pytest.approx(0.008944 / 6**0.5, rel=0.02)
    for weight in (layer.attention.qkv_linear.wq.weight, model.tok_embeddings.weight, model.lm_head.weight):
        assert weight.std().item() == pytest.approx(0.008944, rel=0.02)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    def draw(name: str, seed: int) -> torch.Tensor:
        weight = torch.empty(300, 700)
        fill_normal(weight, name, seed=seed, std=1.0)
        return weight

    assert torch.equal(draw("a", 1), draw("a", 1))
    assert not torch.equal(draw("a", 1), draw("b", 1))
    assert not torch.equal(draw("a", 1), draw("a", 2))
    blocks = draw("a", 1).flatten()
    assert len(blocks.unique()) > 0.99 * len(blocks)  # no block repeats another
