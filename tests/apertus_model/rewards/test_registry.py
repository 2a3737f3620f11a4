from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from apertus_model.rewards import RewardError, Scored, open_reward
from apertus_model.rewards.registry import score_prompt
from specs.rewards import RewardSpec


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of somebody else with a few rewards."""
    (tmp_path / "their_rewards.py").write_text(
        "calls = []\n"
        "def length(items):\n"
        "    calls.append(len(items))\n"
        "    return [len(item.completion) for item in items]\n"
        "def broken(items):\n"
        "    raise ZeroDivisionError('of theirs')\n"
        "def short(items):\n"
        "    return [1.0]\n"
        "def nan(items):\n"
        "    return [float('nan') for item in items]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_rewards", raising=False)
    return "their_rewards"


def _items(*completions: str) -> list[Scored]:
    return [Scored([{"role": "user", "content": "?"}], completion) for completion in completions]


def test_a_function_of_a_package_scores_the_completions_of_a_prompt_together(
    installed: str, tmp_path: Path
) -> None:
    spec = RewardSpec(function=f"{installed}:length", version=1)
    assert installed not in sys.modules
    reward = open_reward(spec, tmp_path)
    assert score_prompt(reward, _items("a", "bb", ""), "p") == [1.0, 2.0, 0.0]
    assert sys.modules[installed].calls == [3]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "prompt p7: ZeroDivisionError: of theirs"),
        ("short", "1 values for the 2 completions of prompt p7"),
        ("nan", "prompt p7 is nan for the completion 'a'"),
    ],
)
def test_a_reward_without_a_value_names_the_prompt(
    installed: str, tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        score_prompt(
            open_reward(RewardSpec(function=f"{installed}:{name}", version=1), tmp_path),
            _items("a", "b"),
            "p7",
        )


def test_a_function_that_is_not_there_is_a_message(installed: str, tmp_path: Path) -> None:
    for function in (f"{installed}:nothing", "no_such_package.module:name"):
        with pytest.raises(RewardError, match=r"cannot be imported.*install its package"):
            open_reward(RewardSpec(function=function, version=1), tmp_path)


def test_ours_are_opened_by_name(tmp_path: Path) -> None:
    item = Scored([], "the same", answer="the same")
    for name in ("reference-overlap", "grounded-answer"):
        assert math.isclose(open_reward(RewardSpec(function=name), tmp_path).score([item])[0], 1.0)
