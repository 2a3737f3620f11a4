from __future__ import annotations

from pathlib import Path

import pytest

from specs.recipe import load
from specs.stages.reward_model import RewardModelStage
from tests.recipes import CHAT, problems, write_recipe

STAGE = """\
  judge: {{kind: reward_model, from: sft, pairs: [chat], global_batch_size: 4, budget: 4 steps,
    optimizer: {{lr: 1e-4}}}}
"""


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stages.judge.pairs=[chat, chat]", "a part is repeated"),
        ("stages.judge.pairs=[corpus/notes]", "stage 'corpus' is a corpus; conversations is needed here"),
        ("stages.judge.carry=[weights, optimizer]", "set carry: [weights]"),
        ("stages.judge.loss.centring=-1", "-1 is below 0.0"),
        ("stages.judge.launch={processes: 2, parallel: {pp: 2}}", "'judge' cannot run in a pipeline (pp 2)"),
        (
            "stages.judge.optimizer={name: sophia, lr: 1e-4}",
            "needs cross-entropy over the tokens of a step, and not bradley-terry",
        ),
        ("stages.cooldown.from=judge", "stage 'judge' is a reward_model"),
        ("stages.merged.checkpoints=[qrpo, judge]", "stage 'judge' is a reward_model"),
        ("stages.preferences.reward={from: sft}", "stage 'sft' is an sft; reward_model is needed here"),
        ("stages.pretrain.model.head=reward", "pretraining needs the logits of a vocabulary"),
    ],
)
def test_a_wrong_reward_model_is_refused_with_the_reason(tmp_path: Path, override: str, told: str) -> None:
    assert told in problems(write_recipe(tmp_path, CHAT + STAGE), override)


def test_a_reward_model_has_one_output_and_the_trunk_of_its_parent(tmp_path: Path) -> None:
    pipeline = load(write_recipe(tmp_path, CHAT + STAGE))
    stage = pipeline.stages["judge"]
    assert isinstance(stage, RewardModelStage)
    (phase,) = stage.phases("judge")
    assert (phase.head, stage.result(), stage.max_repetition) == ("reward", "reward_model", 1.0)
