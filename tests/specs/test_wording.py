"""Values of a wrong type, or outside their bounds, in our words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes import CHAT, problems, write_recipe


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optimizer.lr=fast", "lr: 'fast' is not a number. Fix: write a number, such as 0.1."),
        ("optimizer.lr=.nan", "lr: .nan is not a number. Fix: write a number, such as 0.1."),
        ("sequence_length=.inf", "sequence_length: .inf is not a whole number. Fix: write a whole number"),
        ("sequence_length=64.5", "sequence_length: 64.5 is not a whole number. Fix: write a whole number"),
        ("sequence_length=4", "sequence_length: 4 is below 8. Fix: write 8 or more."),
        ("compile=perhaps", "compile: 'perhaps' is neither true nor false. Fix: write true or false."),
        ("budget=null", "budget: null is not an amount; write for example '15T tokens'"),
        ("budget=true", "budget: true is not an amount; write for example '15T tokens'"),
        ("checkpoint.interval=[true]", "interval: [true] is not an interval; write steps, such as 100"),
        ("trainable=layers", "trainable: 'layers' is not a list. Fix: write a list, such as [a, b]."),
        ("trainable=[1]", "trainable[0]: 1 is not text. Fix: write text, a number in quotes."),
        ("goldfish=[null]", "goldfish: [null] is not a mapping. Fix: write names and values"),
        (
            "mixture=3",
            "mixture: 3 is not text and not a mapping and not 'rest of parent'. Fix: write text, a number in"
            " quotes, or write names and values, such as {name: value}, or write 'rest of parent'.",
        ),
        ("attention=flsh", "attention: 'flsh' is not one of the choices. Fix: did you mean 'flash'?"),
        ("optimizer.betas=[0.5]", "betas: [0.5] is too short. Fix: add what is missing."),
        ("optimizer.betas=[0.9, 2, 0.9]", "betas[1]: 2 is not below 1.0. Fix: write a smaller number."),
        (
            "model.layer_pairs={start: 0, layers: 3}",
            "layers: 3 is not a multiple of 2. Fix: write a multiple.",
        ),
        ("model.flavour=[8b]", "flavour: ['8b'] is not text. Fix: write text, a number in quotes."),
        ("model.flavour=9b", "flavour: there is no flavour '9b'; use one of mini, 0.5b"),
    ],
)
def test_a_wrong_value_of_a_field_is_one_problem(tmp_path: Path, assignment: str, message: str) -> None:
    text = problems(write_recipe(tmp_path), f"stages.pretrain.{assignment}")
    assert message in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("size", ["lots", "5 bananas", "[5]"])
def test_a_wrong_size_is_one_problem(tmp_path: Path, size: str) -> None:
    text = problems(write_recipe(tmp_path), f"stages.export.max_shard_size={size}")
    assert "max_shard_size: " in text
    assert " is not a size. Fix: write a size with its unit, such as 5GB." in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("function", ["[a]", "{}"])
def test_a_reward_of_a_wrong_type_is_one_problem(tmp_path: Path, function: str) -> None:
    text = problems(write_recipe(tmp_path, CHAT), f"stages.preferences.reward={{function: {function}}}")
    assert "stages.preferences.reward.function: " in text and " is not text. Fix: write text" in text
    assert len(text.splitlines()) == 1
