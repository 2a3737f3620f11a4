"""FLOPs of a step are the published ones."""

from __future__ import annotations

import pytest

from flows.planning.estimate import flops
from specs.model import ModelSpec
from tests.flows.planning.segments import segment


def test_flops_are_those_of_the_report() -> None:
    """arXiv 2509.14233, appendix E: 6.74e24 for 70B over 15T tokens."""
    assert flops.training(segment("70b")) * 15e12 == pytest.approx(6.74e24, rel=1e-3)


@pytest.mark.parametrize("flavour", ["1.5b", "8b", "70b"])
def test_flops_are_six_times_the_parameters_and_twelve_times_the_scores(flavour: str) -> None:
    """PaLM (arXiv 2204.02311, appendix B): 6 N + 12 L Q S, N without the input embedding; norms and
    scalars are not in matrices."""
    model = ModelSpec(flavour=flavour)
    inside = model.parameters - model.vocab_size * model.dim
    scores = 12 * model.n_layers * model.n_heads * model.head_dim * 4096
    assert flops.training(segment(flavour)) == pytest.approx(6 * inside + scores, rel=1e-4)
    assert flops.training(segment(flavour)) == model.flops_per_token(4096)
