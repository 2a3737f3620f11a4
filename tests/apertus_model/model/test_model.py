"""The Apertus model against transformers, against the published parameter counts, and against its own promises."""

import pytest
import torch
from torch import nn

from apertus_model.model.attention import AttentionBackendError, document_mask, resolve_backend
from apertus_model.model.feed_forward import XIELU
from apertus_model.model.hf import from_hugging_face, hugging_face_config, to_hugging_face
from apertus_model.model.init import fill_normal
from apertus_model.model.model import ApertusModel, llama3_inverse_frequencies, model_config, rope_config
from specs.model import ModelSpec
from tests.numerics import Numerics, largest_difference

TINY = ModelSpec(dim=48, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=256, init_std=0.3)
SEQUENCE_LENGTH = 64


def build(spec: ModelSpec = TINY, seed: int = 0) -> ApertusModel:
    model = model_config(spec, sequence_length=SEQUENCE_LENGTH, attention="sdpa", seed=seed).build()
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and scalars that are not at their neutral start
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


def tokens(rows: int = 2, length: int = SEQUENCE_LENGTH) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scaled", [True, False])
def test_logits_equal_those_of_transformers(scaled: bool, numerics: Numerics) -> None:
    from transformers import ApertusConfig, ApertusForCausalLM

    spec = TINY if scaled else TINY.model_copy(update={"rope_scaling": None})
    if scaled:  # a short original context, so that all three regions of the scaling are in use
        scaling = spec.rope_scaling.model_copy(update={"original_max_position": 32})
        spec = spec.model_copy(update={"rope_scaling": scaling, "rope_theta": 1000.0})
    model = build(spec)
    config = ApertusConfig(
        **hugging_face_config(spec, max_position_embeddings=SEQUENCE_LENGTH, bos_token_id=1, eos_token_id=2, pad_token_id=3)
    )
    theirs = ApertusForCausalLM(config)
    theirs.load_state_dict(to_hugging_face(model.state_dict()), strict=True)
    with torch.no_grad():
        ours, expected = model(tokens()), theirs.eval()(tokens()).logits
    numerics(
        "model",
        f"logits of 3 layers, {'all regions of the RoPE scaling in use' if scaled else 'no RoPE scaling'}",
        source="arXiv 2509.14233, section 2.1",
        against="ApertusForCausalLM of transformers, random weights",
        difference=largest_difference(ours, expected),
        allowed=2e-5,
    )


def test_hugging_face_names_go_there_and_back_without_loss() -> None:
    weights = build().state_dict()
    back = from_hugging_face(to_hugging_face(weights))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_a_checkpoint_with_another_xielu_constant_is_refused() -> None:
    weights = to_hugging_face(build().state_dict())
    weights["model.layers.1.mlp.act_fn.beta"] = torch.tensor(0.25)
    with pytest.raises(ValueError, match=r"beta is 0\.25"):
        from_hugging_face(weights)


def test_changing_one_document_never_changes_the_logits_of_its_neighbours() -> None:
    model = build()
    border = 23
    positions = torch.cat([torch.arange(border), torch.arange(SEQUENCE_LENGTH - border)]).expand(1, -1)
    original = tokens(1)
    first_changed, second_changed = original.clone(), original.clone()
    first_changed[:, :border] = (original[:, :border] + 1) % TINY.vocab_size
    second_changed[:, border:] = (original[:, border:] + 1) % TINY.vocab_size
    with torch.no_grad():
        logits = model(original, positions)
        alone = model(original[:, border:])
        assert torch.equal(model(first_changed, positions)[:, border:], logits[:, border:])
        assert torch.equal(model(second_changed, positions)[:, :border], logits[:, :border])
        assert not torch.equal(model(first_changed, positions)[:, :border], logits[:, :border])
    torch.testing.assert_close(alone, logits[:, border:], rtol=0, atol=1e-5)


def test_document_mask_is_causal_and_ends_at_borders() -> None:
    mask = document_mask(torch.tensor([[0, 1, 2, 0, 1]]))[0, 0]
    expected = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(mask, expected)


@pytest.mark.parametrize(("flavour", "count"), [("8b", 8_053_338_176), ("70b", 70_599_864_480)])
def test_published_sizes_have_the_published_number_of_parameters(flavour: str, count: int) -> None:
    spec = ModelSpec(flavour=flavour)
    with torch.device("meta"):
        model = model_config(spec, sequence_length=128, attention="sdpa").build()
    assert sum(parameter.numel() for parameter in model.parameters()) == count == spec.parameters


def test_xielu_follows_its_formula_in_float64(numerics: Numerics) -> None:
    activation = XIELU(XIELU.Config())
    with torch.no_grad():
        activation.alpha_p.fill_(0.3)
        activation.alpha_n.fill_(-0.7)
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    alpha_p = torch.log1p(torch.exp(torch.tensor(0.3, dtype=torch.float64)))
    alpha_n = 0.5 + torch.log1p(torch.exp(torch.tensor(-0.7, dtype=torch.float64)))
    expected = torch.where(x > 0, alpha_p * x**2 + 0.5 * x, alpha_n * (torch.expm1(x.clamp(max=-1e-6)) - x) + 0.5 * x)
    numerics(
        "model",
        "xIELU from -6 to 6, relative above 1",
        source="arXiv 2411.13010",
        against="the published form in float64, which its eps of -1e-6 moves by 1e-6 a_n at 0",
        difference=largest_difference(activation(x.float()), expected, relative_above=1.0),
        allowed=1e-6,
    )


def test_the_gradient_of_xielu_is_that_of_its_formula(numerics: Numerics) -> None:
    activation = XIELU(XIELU.Config()).double()
    with torch.no_grad():
        activation.alpha_p.fill_(0.3)
        activation.alpha_n.fill_(-0.7)
    x = torch.tensor([-3.0, -0.5, -1e-3, 1e-3, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    (activation(x) * weights).sum().backward()
    alpha_p, alpha_n = (torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (0.3, -0.7))
    slope_p, slope_n = nn.functional.softplus(alpha_p), 0.5 + nn.functional.softplus(alpha_n)
    y = x.detach().clone().requires_grad_()
    plain = torch.where(y > 0, slope_p * y**2, slope_n * (torch.expm1(y.clamp(max=-1e-6)) - y)) + 0.5 * y
    (plain * weights).sum().backward()
    truth = {"source": "arXiv 2411.13010", "against": "autograd through the formula in float64"}
    numerics(
        "model",
        "gradient of xIELU by its input, float64, relative",
        **truth,
        difference=largest_difference(x.grad, y.grad, relative_above=0.0),
        allowed=1e-12,
    )
    numerics(
        "model",
        "gradient of xIELU by its scalars, float64 summed in float32, relative",
        **truth,
        difference=largest_difference([activation.alpha_p.grad, activation.alpha_n.grad], [alpha_p.grad, alpha_n.grad], relative_above=0.0),
        allowed=1e-6,
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


def test_rope_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    frequencies = llama3_inverse_frequencies(rope_config(ModelSpec(flavour="8b"), 16))
    plain = llama3_inverse_frequencies(rope_config(ModelSpec(flavour="8b", rope_scaling=None), 16))
    wavelengths = 2 * torch.pi / plain
    assert torch.equal(frequencies[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4])
    torch.testing.assert_close(frequencies[wavelengths > 8192], plain[wavelengths > 8192] / 8)


def test_a_backend_that_cannot_run_here_is_refused_with_the_reason() -> None:
    with pytest.raises(AttentionBackendError, match=r"'flash'.*needs a GPU.*what can: sdpa"):
        resolve_backend("flash", param_dtype="bfloat16", context_parallel=1)
    with pytest.raises(AttentionBackendError, match="no such backend"):
        resolve_backend("eager", param_dtype="float32", context_parallel=1)


def test_auto_takes_sdpa_on_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert resolve_backend("auto", param_dtype="float32", context_parallel=1) == "sdpa"
    assert "sdpa (no GPU)" in caplog.text
