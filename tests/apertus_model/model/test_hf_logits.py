"""Logits and layers of this model and of transformers' `ApertusForCausalLM`, for random weights; parameters of the published sizes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from apertus_model.model.hf import to_hugging_face
from apertus_model.model.hf_folder import modules, shapes
from apertus_model.model.hf_layers import SideBySide
from apertus_model.model.model import model_config
from specs.hugging_face import hugging_face_config
from specs.model import FLAVOURS, ModelSpec
from tests.numerics import Numerics, largest_difference

THETAS = [500_000.0, 1e6, 2e6, 4e6, 12e6]  # pretraining, and the long-context steps (apertus_recipe.md, sections 1 and 8)


def their_config(spec: ModelSpec) -> Any:
    from transformers import ApertusConfig

    return ApertusConfig(**hugging_face_config(spec, max_position_embeddings=65_536, bos_token_id=1, eos_token_id=2, pad_token_id=3))


def random_weights(sizes: dict[str, torch.Size], seed: int = 0) -> dict[str, torch.Tensor]:
    """Matrices that keep the size of what goes through them; norms about 1; xIELU scalars anywhere between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sizes.items():
        value = torch.randn(shape, generator=generator)
        if name.endswith((".alpha_p", ".alpha_n")):
            value = value.tanh_()
        elif len(shape) == 1:
            value = value.mul_(0.2).add_(1)
        else:
            value = value.mul_(shape[1] ** -0.5)
        weights[name] = value
    return weights


@pytest.fixture(autouse=True, scope="module")
def _two_threads() -> Iterator[None]:
    """More threads than cores make small products slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("scaled", [True, False])
def test_logits_of_mini_equal_those_of_transformers(scaled: bool, numerics: Numerics) -> None:
    from transformers import ApertusForCausalLM

    tokens = torch.randint(0, 2048, (1, 256), generator=torch.Generator().manual_seed(1))
    for theta in THETAS:
        spec = ModelSpec(flavour="mini", rope_theta=theta, **({} if scaled else {"rope_scaling": None}))
        weights = random_weights(shapes(spec), seed=int(theta))
        ours = model_config(spec, sequence_length=256, attention="sdpa").build()
        ours.load_state_dict(weights)
        theirs = ApertusForCausalLM(their_config(spec)).eval()
        theirs.load_state_dict(to_hugging_face(weights), strict=True)
        with torch.no_grad():
            logits = theirs(tokens).logits
            found = ours(tokens)
        assert logits.abs().max().item() > 2
        numerics(
            "model",
            f"logits of mini, rope_theta 0.5M to 12M, {'with' if scaled else 'without'} RoPE scaling",
            source="arXiv 2509.14233, section 2.1",
            against="ApertusForCausalLM of transformers, random weights",
            difference=largest_difference(found, logits),
            allowed=2e-5,
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flavour", ["0.5b", "1.5b", "3b"])
def test_logits_of_whole_flavours_equal_those_of_transformers(flavour: str, numerics: Numerics) -> None:
    """Both models have the same tensors: 1.8, 6 and 14.5 GB."""
    from transformers import ApertusForCausalLM

    tokens = torch.randint(0, 131_072, (1, 48), generator=torch.Generator().manual_seed(1))
    spec = ModelSpec(flavour=flavour)
    ours = model_config(spec, sequence_length=48, attention="sdpa").build()
    weights = ours.state_dict()
    for index, (name, weight) in enumerate(weights.items()):
        weight.copy_(random_weights({name: weight.shape}, seed=index)[name])
    with torch.device("meta"):
        theirs = ApertusForCausalLM(their_config(spec)).eval()
    theirs.load_state_dict(to_hugging_face(weights), strict=True, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config=theirs.config)  # a buffer that no weight fills
    with torch.no_grad():
        found, logits = ours(tokens), theirs(tokens).logits
    assert logits.abs().max().item() > 2
    numerics(
        "model",
        f"logits of {flavour}",
        source="arXiv 2509.14233, section 2.1",
        against="ApertusForCausalLM of transformers, random weights",
        difference=largest_difference(found, logits),
        allowed=2e-5,
    )


def test_a_piece_at_a_time_gives_the_logits_of_the_whole_on_both_sides(numerics: Numerics) -> None:
    from transformers import ApertusForCausalLM

    spec = ModelSpec(flavour="mini")
    weights = random_weights(shapes(spec))
    tokens = torch.randint(0, spec.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    ours = model_config(spec, sequence_length=64, attention="sdpa").build()
    ours.load_state_dict(weights)
    theirs = ApertusForCausalLM(their_config(spec)).eval()
    theirs.load_state_dict(to_hugging_face(weights))
    sides = SideBySide(spec, their_config(spec), tokens)
    for module, members in modules(spec).items():
        difference = sides.advance(module, {name: weights[name] for name in members})
    with torch.no_grad():
        whole = [ours(tokens), theirs(tokens).logits]
    numerics(
        "model",
        "logits of mini, a layer in memory at a time",
        source="arXiv 2509.14233, section 2.1",
        against="whole models, this one and that of transformers",
        difference=largest_difference([sides.ours, sides.theirs], whole),
        allowed=0.0,
    )
    assert difference == (sides.ours - sides.theirs).abs().max().item() < 2e-5


@pytest.mark.parametrize(
    ("flavour", "theta"),
    [("0.5b", 500_000.0), ("1.5b", 1e6), ("3b", 4e6)]
    + [pytest.param(flavour, 12e6, marks=pytest.mark.slow) for flavour in ("8b", "70b")],  # 70b: 4 GB
)
def test_a_layer_of_every_size_equals_that_of_transformers(flavour: str, theta: float, numerics: Numerics) -> None:
    spec = ModelSpec(flavour=flavour, n_layers=1, vocab_size=128, rope_theta=theta)
    hidden = torch.randn(1, 96, spec.dim, generator=torch.Generator().manual_seed(2))
    sides = SideBySide(spec, their_config(spec), hidden)
    difference = sides.advance("layers.0", random_weights(modules(spec)["layers.0"]))
    largest = sides.theirs.abs().max().item()
    assert largest > 5
    assert not torch.equal(sides.theirs, hidden)
    numerics(
        "model",
        f"output of a decoder layer of {flavour}, relative to its largest value",
        source="arXiv 2509.14233, section 2.1",
        against="ApertusDecoderLayer of transformers, random weights",
        difference=difference / largest,
        allowed=3e-6,
    )


@pytest.mark.parametrize(("flavour", "count"), [("8b", 8_053_338_176), ("70b", 70_599_864_480)])
def test_published_sizes_have_the_published_number_of_parameters_there_and_here(flavour: str, count: int, numerics: Numerics) -> None:
    from transformers import ApertusForCausalLM

    spec = ModelSpec(flavour=flavour)
    with torch.device("meta"):
        theirs = ApertusForCausalLM(their_config(spec))
        ours = model_config(spec, sequence_length=4096, attention="sdpa").build()
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    numerics(
        "model",
        f"number of parameters of {flavour}: model, that of transformers, spec",
        source="dimensions of arXiv 2509.14233, table 1",
        against=f"{count:,}",
        difference=largest_difference([*counts, spec.parameters], [count] * 3),
        allowed=0.0,
    )


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_weight_has_its_name_and_shape_in_transformers(flavour: str) -> None:
    from transformers import ApertusForCausalLM

    spec = ModelSpec(flavour=flavour)
    with torch.device("meta"):
        theirs = ApertusForCausalLM(their_config(spec)).state_dict()
        ours = to_hugging_face({name: torch.empty(shape) for name, shape in shapes(spec).items()})
    assert {name: weight.shape for name, weight in ours.items()} == {name: weight.shape for name, weight in theirs.items()}
