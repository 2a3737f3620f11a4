"""A model of which one layer is held at a time, beside that of transformers."""

from collections.abc import Iterator

import pytest
import torch

from apertus_model.model.hf import to_hugging_face
from apertus_model.model.hf_folder import modules
from apertus_model.model.hf_layers import SideBySide
from apertus_model.model.model import model_config, shapes
from specs.model import ModelSpec
from tests.apertus_model.model.theirs import random_weights, their_config
from tests.machine import slow
from tests.numerics import Numerics, largest_difference


@pytest.fixture(autouse=True, scope="module")
def _two_threads() -> Iterator[None]:
    """More threads than cores make small products slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


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
    [("0.5b", 500_000.0), slow("1.5b", 1e6), slow("3b", 4e6)]
    + [slow(flavour, 12e6) for flavour in ("8b", "70b")],  # 70b: 4 GB
)
def test_a_layer_of_every_size_equals_that_of_transformers(
    flavour: str, theta: float, numerics: Numerics
) -> None:
    spec = ModelSpec(flavour=flavour, n_layers=1, vocab_size=128, rope_theta=theta)
    hidden = torch.randn(1, 96, spec.dim, generator=torch.Generator().manual_seed(2))
    sides = SideBySide(spec, their_config(spec), hidden)
    difference = sides.advance("layers.0", random_weights(modules(spec)["layers.0"]))
    largest = sides.theirs.abs().max().item()
    assert largest > 5
    assert not torch.equal(sides.theirs, hidden)
    numerics(
        "model",
        "output of a decoder layer, 0.5b to 70b, relative to its largest value",
        source="arXiv 2509.14233, section 2.1",
        against="ApertusDecoderLayer of transformers, random weights",
        difference=difference / largest,
        allowed=3e-6,
    )
