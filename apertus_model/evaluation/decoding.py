"""How the next token of a continuation is chosen from the logits.

Invariant: a drawn token is a function of the logits, the seed, the number of the row and the step. Neither
the batch nor the layout changes it, except where the rounding of logits decides between two words.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from apertus_model.losses.drawn_labels import word_noise
from apertus_model.trainer.evaluator import Choice


def greedy(logits_RV: torch.Tensor, numbers_R: torch.Tensor, step: int) -> torch.Tensor:
    """The most likely token: (rows, vocabulary) -> (rows,)."""
    return logits_RV.argmax(dim=-1)


def nucleus(top_p: float, temperature: float, seed: int, *, length: int) -> Choice:
    """Draws from the nucleus (arXiv 1904.09751): the fewest most likely tokens whose probability is at least
    `top_p`, after division of the logits by `temperature`.

    The token with the largest logit + Gumbel noise in the nucleus is a draw from its distribution.

    Args:
        top_p: probability of the nucleus, 0 < top_p <= 1.
        temperature: positive.
        seed: signed 32-bit integer.
        length: tokens of a continuation; rows and steps are numbered by it.
    """

    def choose(logits_RV: torch.Tensor, numbers_R: torch.Tensor, step: int) -> torch.Tensor:
        ordered_RV, words_RV = (logits_RV.double() / temperature).sort(dim=-1, descending=True, stable=True)
        chances_RV = ordered_RV.softmax(dim=-1).cpu()  # sums in order are deterministic on the host only
        more_likely_RV = chances_RV.cumsum(dim=-1) - chances_RV
        sizes_R = (more_likely_RV < top_p).sum(dim=-1).clamp(min=1).to(logits_RV.device)
        vocabulary_V = torch.arange(logits_RV.shape[1], dtype=torch.int32, device=logits_RV.device)
        places_R = (numbers_R * length + step).to(logits_RV.device, torch.int32)
        noise_RV = word_noise(places_R, vocabulary_V, seed, ordered_RV.dtype).gather(1, words_RV)
        outside_RV = vocabulary_V >= sizes_R[:, None]
        best_R = (ordered_RV + noise_RV).masked_fill(outside_RV, -torch.inf).argmax(dim=-1)
        return words_RV.gather(1, best_R[:, None]).squeeze(1)

    return choose
