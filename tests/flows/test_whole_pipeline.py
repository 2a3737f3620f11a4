"""Plans of the kinds behind pretraining: which parts there are, what they share, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.planning.plan import Plan
from specs.errors import SpecError
from tests.flows.conftest import finish

Planned = Callable[..., Plan]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.qrpo.from=longer",
            (
                r"stages\.qrpo\.from: 'preferences' was made with step 8 of 'sft', but this stage starts from"
                r" 'longer'"
            ),
        ),
        (
            "stages.qrpo.sequence_length=64",
            r"'preferences' has sequence_length 128, this stage 64. Fix: set 128",
        ),
        ("stages.dpo.precision.param=bfloat16", r"are in float32, this stage computes in bfloat16"),
        (
            "stages.preferences.max_tokens=100",
            r"two completions of 100 tokens do not fit into a sequence of 128. Fix: lower it to 64",
        ),
        (
            "stages.evaluate-qrpo.generation.sampling.seed=1",
            r"'evaluate-sft' and this stage differ in prompts or sampling",
        ),
        (
            "stages.preferences.reward=best-answer",
            r"there is no reward 'best-answer'; use one of grounded-answer",
        ),
        (
            'stages.preferences.reward={function: "my.module:reward"}',
            r"reward my.module:reward states no version",
        ),
        (
            "stages.sft.conversations=corpus/notes",
            r"stage 'corpus' is a corpus; conversations is needed here",
        ),
        (
            "stages.chat.sources.notes.holdout=0.1",
            r"source 'notes' has format text; a conversations needs chat, conversations",
        ),
        (
            "stages.qrpo.optimizer={}",
            r"stages\.qrpo\.optimizer\.lr: the learning rate has decayed to 0 at step 8 of 'sft'",
        ),
        ("stages.longer.steps.0.carry=[data]", r"carries its weights; add weights to carry"),
        (
            "stages.qrpo.launch={processes: 2, parallel: {pp: 2}}",
            r"cannot run in a pipeline \(pp 2\): its loss needs the whole sequences",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_reason(
    chat: Planned, override: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        chat(override)


def test_choosing_by_held_out_loss_needs_one(chat: Planned) -> None:
    with pytest.raises(SpecError, match=r"'sft' measures none. Fix: give it a validation.interval"):
        chat("stages.evaluate-sft.from=sft@best:val_loss", "stages.sft.validation.interval=0")


def test_a_finished_pipeline_is_reused_whole(chat: Planned) -> None:
    finish(chat())
    assert {step.action for step in chat().steps.values()} == {"reuse"}
