"""The order of the stages: inputs first."""

from __future__ import annotations

from typing import Any

import pytest

from specs.dependencies import order
from specs.document import Document
from specs.errors import SpecError
from specs.recipe import validate


def ordered(**stages: dict[str, Any]) -> list[str]:
    training = {"global_batch_size": 4, "budget": "4 steps"}
    document = {
        "name": "t",
        "sources": {"s": {"url": "/nowhere", "format": "text"}},
        "stages": {
            "c": {"kind": "corpus", "tokenizer": "tok", "sources": {"s": {}}},
            "m": {"kind": "mixture", "weights": {"c/s": 1}},
            "first": {"kind": "cooldown", "from": "base@step=2", "mixture": "rest of parent", **training},
            "base": {
                **{"kind": "pretrain", "model": {"flavour": "mini"}, "sequence_length": 8, "mixture": "m"},
                **{"optimizer": {"lr": 1e-3}, **training},
            },
            "tok": {"kind": "tokenizer", "sources": ["s"], "vocab_size": 512},
            **stages,
        },
    }
    return order(validate(Document("t.yaml", document)))


def test_stages_follow_what_they_read() -> None:
    assert ordered() == ["tok", "c", "m", "base", "first"]


def test_a_stage_follows_what_its_mixture_excludes_but_not_what_starts_from_the_stage() -> None:
    mixture = {"kind": "mixture", "weights": {"c/s": 1}, "exclude": ["base", "first"]}
    assert ordered(m=mixture) == ["tok", "c", "m", "base", "first"]
    after = ordered(
        m=mixture, other={"kind": "cooldown", "from": "base", "mixture": "m", "budget": "4 steps"}
    )
    assert after.index("first") < after.index("other")


def test_a_cycle_is_refused_by_name() -> None:
    cooldown = {"kind": "cooldown", "from": "first", "mixture": "m", "budget": "4 steps"}
    with pytest.raises(SpecError, match="the stages form a cycle: first -> base -> first"):
        ordered(base=cooldown)
