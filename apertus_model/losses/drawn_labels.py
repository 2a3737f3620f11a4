"""Labels that a model draws from its own distribution, straight from hidden states.

The word with the largest logit + Gumbel noise is a draw from the softmax, whose normalising sum need not be
known. The noise of a (place, word) is a hash of their numbers and of a seed. A few places are drawn at a
time, so that (tokens x vocabulary) values never exist at once: with V words, logits of b bytes and P =
`PLACES`, the extra memory is at most P V (16 + b) bytes.

Invariant: a draw is a function of the distribution, the seed and the number of the place. It is the same
after a restart, and on every layout, except where the rounding of logits decides between two words.

Shape suffixes as in `cross_entropy`: B batch, L local sequence, D width, V local part of the vocabulary, P
places drawn together.
"""

import torch
import torch.distributed as dist

from apertus_model.hashing import hashed
from apertus_model.losses.cross_entropy import IGNORE_INDEX, LastStates, logits

PLACES = 128


@torch.no_grad()
def draw_labels(states: LastStates, places_BL: torch.Tensor, seed: int) -> torch.Tensor:
    """A word from softmax(weight hidden) wherever there is a label: (batch, length) int64; -100 where the
    label is ignored. All ranks that share the vocabulary get the same labels.

    Args:
        places_BL: (batch, length) int64, the number of each place; modulo 2^32, places with the same number
            have the same noise.
        seed: signed 32-bit integer.
    """
    hidden_BLD, weight_VD, labels_BL, vocab = states
    states_ND, places = hidden_BLD.flatten(0, 1), places_BL.flatten().to(torch.int32)
    drawn_BL = torch.full_like(labels_BL, IGNORE_INDEX, device=hidden_BLD.device)
    own_V = torch.arange(len(weight_VD), dtype=torch.int32, device=weight_VD.device) + vocab.begin
    kept = (labels_BL != IGNORE_INDEX).flatten().nonzero().squeeze(1).to(hidden_BLD.device, non_blocking=True)
    for at_P in kept.split(PLACES):
        logits_PV = logits(states_ND[at_P], weight_VD)
        logits_PV += word_noise(places[at_P], own_V, seed, logits_PV.dtype)
        best_P, index_P = logits_PV.max(1)
        largest_P = vocab.reduce(best_P.clone(), dist.ReduceOp.MAX)
        word_P = torch.where(best_P == largest_P, index_P + vocab.begin, torch.iinfo(torch.int64).max)
        drawn_BL.view(-1)[at_P] = vocab.reduce(word_P, dist.ReduceOp.MIN)
    return drawn_BL


def word_noise(places_P: torch.Tensor, words_V: torch.Tensor, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Gumbel noise of every word at every place: (places, words). Places and words are int32."""
    # hashed once more than places, so that a place and a word with equal numbers have different hashes
    noise_V = hashed(hashed(words_V.clone(), seed), seed)
    return gumbel(hashed(places_P.clone(), seed)[:, None] ^ noise_V, dtype)


def gumbel(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Standard Gumbel noise, -ln E for an exponential E, a function of each int32 number; overwrites them.

    E = -ln(1 - u) for u of 31 bits in (0, 1]: small E, which give large noise, are exact. The largest noise
    is 22.2.
    """
    uniform = ((hashed(numbers, 0) & 0x7FFFFFFF).to(dtype) + 0.5) * 2.0**-31
    return uniform.neg_().log1p_().neg_().log_().neg_()
