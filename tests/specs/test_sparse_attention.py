"""Sparse attention in a model's spec: its identity, its cost, and what a plan refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flows.planning.estimate import flops
from flows.planning.plan import make
from infra.store import Store
from specs.errors import SpecError
from specs.hugging_face import HuggingFaceError, hugging_face_config
from specs.model import ModelSpec
from specs.recipe import load
from tests.models import flops_per_token
from tests.recipes import write_recipe

HASH = "stages.pretrain.model.attention={sparse: hash, buckets: 4}"
EARLIER = """\
  rest:
    kind: rewrite
    from: pretrain
    attention: %s
"""


def model(**attention: Any) -> ModelSpec:
    return ModelSpec(flavour="mini", attention=attention or None)


def test_full_attention_is_neutral() -> None:
    assert "attention" not in model().identity_fields()
    assert model(sparse="hash").identity_fields()["attention"] == {"sparse": "hash", "buckets": 8, "seed": 0}
    assert model(sparse="hash").without_method == model()


def test_a_share_of_the_scores_is_counted() -> None:
    plain, length = model(), 64

    def share(**attention: Any) -> float:
        sparse = model(**attention)
        once, all_pairs = flops.forward(sparse, length), flops.forward(plain, length)
        assert once.projections == all_pairs.projections and sparse.parameters == plain.parameters
        assert 3 * once.total == flops_per_token(sparse, length)
        return once.scores / all_pairs.scores

    assert share(sparse="hash", buckets=4) == 1 / 4
    assert share(sparse="drop", queries=0.5, keys=0.25) == 3 / 8
    # queries see 1, 2, ..., 8, 8, 8, ... keys instead of 1, 2, ..., 64
    assert share(sparse="window", window=8) == pytest.approx((36 + 56 * 8) / (64 * 65 / 2), rel=1e-3)
    assert share(sparse="window", window=100) == 1


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"sparse": "hash", "buckets": 3}, "multiple of 2"),
        ({"sparse": "drop", "queries": 0, "keys": 0}, "nothing is left out"),
        ({"sparse": "drop", "keys": 1}, "less than 1"),
        ({"sparse": "window"}, "window\n  Field required"),
        ({"sparse": "random"}, "'hash', 'drop', 'window'"),
    ],
)
def test_what_has_no_meaning_is_refused(attention: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**attention)


@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        (
            ["stages.pretrain.attention=varlen"],
            "stages.pretrain.attention",
            "'pretrain': varlen computes whole documents, and model.attention (sparse: hash) chooses keys in"
            " every head. Fix: set attention: auto, sdpa or flex.",
        ),
        (
            ["launch={processes: 2, parallel: {cp: 2}}"],
            "launch.parallel.cp",
            "'pretrain', 'cooldown', 'evaluate': model.attention (sparse: hash) chooses among the keys of a"
            " whole sequence, and each process has only a part of it. Fix: use cp: 1.",
        ),
    ],
)
def test_what_cannot_compute_it_is_refused_with_field_and_fix(
    tmp_path: Path, settings: list[str], where: str, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load(write_recipe(tmp_path), [HASH, *settings])
    text = re.sub(r"\s+", " ", str(caught.value))
    assert f"{where}: " in text and message in text


def test_an_export_is_refused_with_the_way_to_one(tmp_path: Path) -> None:
    sparse = model(sparse="drop")
    with pytest.raises(HuggingFaceError, match="would load its weights and compute full attention"):
        hugging_face_config(sparse, max_position_embeddings=32, bos_token_id=1, eos_token_id=2)
    store = Store.open(str(tmp_path / "store"))
    with pytest.raises(SpecError) as caught:
        make(load(write_recipe(tmp_path), [HASH]), store)
    text = re.sub(r"\s+", " ", str(caught.value))
    assert (
        "stages.export.from: the model cannot become a Hugging Face folder: its attention is sparse" in text
    )
    assert "a rewrite with attention: full, and a stage from there" in text
