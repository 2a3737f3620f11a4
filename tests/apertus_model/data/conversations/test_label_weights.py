"""What the labels of a conversation weigh, by the formulas of the published losses."""

from __future__ import annotations

import numpy as np
import pytest

from apertus_model.chat.encoder import PROMPT, TRAINED, UNTRAINED
from apertus_model.data.conversations.samples import label_weights
from specs.stages.sft import SftLoss

# the first token is no label
MASK = np.array([PROMPT, PROMPT, PROMPT, TRAINED, UNTRAINED, TRAINED, TRAINED, TRAINED], np.uint8)
PROMPTS = np.array([1, 1, 0, 0, 0, 0, 0])
ANSWERS = np.array([0, 0, 1, 0, 1, 1, 1])


@pytest.mark.parametrize("weight", [0.0, 0.05, 1.0])
def test_weights_and_counts_are_the_stated_ones(weight: float) -> None:
    plain = label_weights(MASK, SftLoss(prompt_weight=weight))
    assert plain.weights[:, 0].tolist() == (ANSWERS + weight * PROMPTS).tolist()
    assert plain.counts.tolist() == [4 + 2 * weight]
    by_one = label_weights(MASK, SftLoss(prompt_weight=weight, average="conversations"))
    assert by_one.weights[:, 0] == pytest.approx((ANSWERS + weight * PROMPTS) / (4 + 2 * weight), rel=1e-15)
    assert by_one.weights.sum() == pytest.approx(1, rel=1e-15)
    assert by_one.counts.tolist() == [1]
    if not weight:
        return
    apart = label_weights(MASK, SftLoss(prompt_weight=weight, length_normalised=True))
    assert apart.weights.T.tolist() == [ANSWERS.tolist(), (weight * PROMPTS).tolist()]
    assert apart.counts.tolist() == [4, 2]
    both = SftLoss(prompt_weight=weight, length_normalised=True, average="conversations")
    assert label_weights(MASK, both).weights[:, 0] == pytest.approx(ANSWERS / 4 + weight * PROMPTS / 2)


def test_a_conversation_without_a_prompt_after_its_first_token_weighs_its_answer_alone() -> None:
    loss = SftLoss(prompt_weight=0.5, length_normalised=True, average="conversations")
    assert label_weights(np.array([PROMPT, TRAINED, TRAINED], np.uint8), loss).weights.tolist() == [
        [0.5],
        [0.5],
    ]
