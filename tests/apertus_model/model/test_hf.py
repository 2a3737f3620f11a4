"""Logits and layers of this model and of transformers' `ApertusForCausalLM`, for random weights;
parameters of the published sizes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from apertus_model.model.hf import to_hugging_face
from apertus_model.model.hf_folder import shapes
from apertus_model.model.model import model_config
from apertus_model.model.rotation import rope_config
from specs.model import FLAVOURS, ModelSpec
from tests.apertus_model.model.theirs import random_weights, their_config
from tests.numerics import Numerics, largest_difference

# pretraining, and the long-context steps (apertus_recipe.md, sections 1 and 8)
THETAS = [500_000.0, 1e6, 2e6, 4e6, 12e6]


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
def test_logits_of_whole_flavours_equal_those_of_transformers(
    flavour: str, numerics: Numerics, tmp_path: Path
) -> None:
    """Both models have the same tensors, of 1.8, 6 and 14.5 GB, which are files: other tests need memory."""
    from transformers import ApertusForCausalLM

    tokens = torch.randint(0, 131_072, (1, 48), generator=torch.Generator().manual_seed(1))
    spec = ModelSpec(flavour=flavour)
    with torch.device("meta"):
        ours = model_config(spec, sequence_length=48, attention="sdpa").build()
        theirs = ApertusForCausalLM(their_config(spec)).eval()
    weights = {}
    for index, (name, shape) in enumerate(shapes(spec).items()):
        file = tmp_path / name
        weights[name] = torch.from_file(str(file), shared=True, size=shape.numel()).view(shape)
        weights[name].copy_(random_weights({name: shape}, seed=index)[name])
        file.unlink()  # its space is free when the tensor is
    ours.load_state_dict(weights, assign=True)
    theirs.load_state_dict(to_hugging_face(weights), strict=True, assign=True)
    # buffers that no weight fills
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config=theirs.config)
    rope = rope_config(spec, 48).build()
    for layer in ours.layers.values():
        layer.attention.rope = rope
    with torch.no_grad():
        found, logits = ours(tokens), theirs(tokens).logits
    assert logits.abs().max().item() > 2
    numerics(
        "model",
        "logits of 0.5b to 3b",
        source="arXiv 2509.14233, section 2.1",
        against="ApertusForCausalLM of transformers, random weights",
        difference=largest_difference(found, logits),
        allowed=2e-5,
    )


@pytest.mark.parametrize(("flavour", "count"), [("8b", 8_053_338_176), ("70b", 70_599_864_480)])
def test_published_sizes_have_the_published_number_of_parameters_there_and_here(
    flavour: str, count: int, numerics: Numerics
) -> None:
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
    assert {name: weight.shape for name, weight in ours.items()} == {
        name: weight.shape for name, weight in theirs.items()
    }
