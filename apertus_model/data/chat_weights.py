"""The weights of a conversation's labels in the loss of fine-tuning.

A step's loss is sum_k (sum_i w_ik l_i) / N_k over its labels i, where l_i is the loss of a label and N_k the
sum of the counts of the step's conversations in column k. With p_i = 1 for a label of a prompt, a_i = 1 for a
label of an answer, and P, A the numbers of prompt and answer labels in a conversation, the columns are

    average        length_normalised   weights w_i                      counts N
    tokens         no                  a_i + prompt_weight p_i          sum of the weights
    tokens         yes                 a_i; prompt_weight p_i           A; P
    conversations  no                  (a_i + prompt_weight p_i) / sum  1
    conversations  yes                 a_i / A + prompt_weight p_i / P  1

which are the losses of `PLWTrainer` and `LengthNormalizedPLWTrainer` of swiss-ai/posttraining
(src/post_training/trainers/sft.py), the last two with `sequence_level_loss`.

Invariant: labels of UNTRAINED tokens and of padding have weight 0 and are never counted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.chat.encoder import PROMPT, TRAINED
from specs.stages.sft import SftLoss


class LabelWeights(NamedTuple):
    """The weights and counts of the labels of one conversation."""

    weights: NDArray[np.float64]  # (labels, columns)
    counts: NDArray[np.float64]  # (columns,)


def label_weights(mask: NDArray[np.uint8], loss: SftLoss) -> LabelWeights:
    """The weights and counts of the labels, which are all tokens except the first.

    Args:
        mask: (tokens,): kinds of the tokens, as in `ConversationShards.mask`.
    """
    answers, prompts = ((mask[1:] == kind).astype(np.float64) for kind in (TRAINED, PROMPT))
    if loss.average == "tokens":
        columns = [answers, loss.prompt_weight * prompts]
        if loss.length_normalised:
            return LabelWeights(np.stack(columns, axis=1), np.array([answers.sum(), prompts.sum()]))
        weights = columns[0] + columns[1]
        return LabelWeights(weights[:, None], weights.sum(keepdims=True))
    if loss.length_normalised:
        weights = _mean(answers) + loss.prompt_weight * _mean(prompts)
    else:
        weights = _mean(answers + loss.prompt_weight * prompts)
    return LabelWeights(weights[:, None], np.ones(1))


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values divided by their sum, or unchanged when the sum is 0."""
    total = values.sum()
    return values / total if total else values
