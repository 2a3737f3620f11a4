"""Parameters and FLOPs of the published sizes."""

from __future__ import annotations

import pytest

from specs.hugging_face import not_representable
from specs.model import ModelSpec
from tests.models import flops_per_token


@pytest.mark.parametrize(
    ("flavour", "parameters", "flops"), [("8b", 8_053_338_176, 5.158e10), ("70b", 70_599_864_480, 4.496e11)]
)
def test_published_sizes(flavour: str, parameters: int, flops: float) -> None:
    model = ModelSpec.model_validate({"flavour": flavour})
    assert model.parameters == parameters
    assert flops_per_token(model, 4096) == pytest.approx(flops, rel=2e-3)


@pytest.mark.parametrize(("flavour", "parameters"), [("0.5b", 0.44e9), ("1.5b", 1.51e9)])
def test_the_small_sizes_have_the_stated_number_of_parameters(flavour: str, parameters: float) -> None:
    """Of the follow-up report, arXiv 2605.29128, to two decimals of a billion."""
    assert round(ModelSpec.model_validate({"flavour": flavour}).parameters / 1e9, 2) == parameters / 1e9


def test_the_name_of_a_flavour_bears_no_identity() -> None:
    model = ModelSpec.model_validate({"flavour": "mini"})
    same = ModelSpec.model_validate({**model.model_dump(exclude={"flavour"})})
    assert model.identity_fields() == same.identity_fields()


def test_a_stated_dimension_wins_over_the_flavour() -> None:
    assert ModelSpec.model_validate({"flavour": "8b", "n_layers": 2}).n_layers == 2


def test_only_a_model_without_qk_norm_says_so_and_transformers_has_no_class_for_it() -> None:
    stated = ModelSpec.model_validate({"flavour": "mini", "qk_norm": False})
    assert stated.identity_fields()["qk_norm"] is False
    assert "qk_norm" not in ModelSpec.model_validate({"flavour": "mini"}).identity_fields()
    assert "has no QK-norm" in (not_representable(stated) or "")
    with pytest.raises(ValueError, match="mamba begins with the norms of queries and keys"):
        ModelSpec.model_validate({"flavour": "mini", "qk_norm": False, "mamba": {"layers": "all"}})


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_kv_heads", 2), ("head_dim", 33), ("vocab_size", 0), ("flavour", "9b"), ("width", 3)],
)
def test_impossible_models_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field if field != "flavour" else "9b"):
        ModelSpec.model_validate({"flavour": "mini", field: value})
