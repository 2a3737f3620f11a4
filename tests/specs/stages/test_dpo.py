from __future__ import annotations

from pathlib import Path

import pytest

from specs.recipe import load
from tests.recipes import CHAT, problems, write_recipe

ONE = "stages.plain: dpo trains on preferences, or on pairs of a file; set preferences or pairs"


def recipe(folder: Path, data: str) -> Path:
    stage = f"""\
  plain:
    kind: dpo
    from: sft
    {data}
    budget: 4 steps
    global_batch_size: 4
    optimizer: {{{{lr: 1e-4}}}}
"""
    return write_recipe(folder, CHAT + stage)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("data_seed: 1", ONE),
        ("pairs: []", ONE),
        ("pairs: [chat]\n    preferences: preferences", ONE),
        ("pairs: [sft]", "stages.plain.pairs[0]: stage 'sft' is an sft; conversations is needed here"),
        ("pairs: [chat, chat]", "a part is repeated"),
        ("preferences: chat", "stage 'chat' is a conversations; preference_data is needed here"),
    ],
)
def test_dpo_has_one_kind_of_data(tmp_path: Path, data: str, told: str) -> None:
    assert told in problems(recipe(tmp_path, data))


def test_dpo_on_pairs_has_no_sets(tmp_path: Path) -> None:
    stage = load(recipe(tmp_path, "pairs: [chat]")).stages["plain"]
    assert (stage.preferences, [str(one) for one in stage.pairs]) == ({}, ["chat"])  # type: ignore[attr-defined]
