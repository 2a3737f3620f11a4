"""Floating-point operations of training, from the shapes alone.

The convention of the Apertus report (appendix E), which is that of PaLM (arXiv 2204.02311, appendix B) and Megatron-LM (arXiv 2104.04473,
appendix): a multiply-add is two operations, a backward pass is two forward passes, and only matrix products count. With L layers of width
D, queries Q = heads x head_dim, keys K, feed-forward F, V words and sequences of S tokens, a token costs

    forward = L (2 D Q + 4 D K + 2 Q D + 4 D F   + 4 Q S) + 2 V D          training = 3 forward
                 projections and feed-forward      scores     output

which is 6 N + 12 L Q S for the N parameters in matrices without the input embedding. Scores are counted in
full: the savings of the causal mask and of document boundaries are ignored (factor 1, not 1/2). 70B over 15T
tokens of 4,096: 6.74e24, as published.

Invariant: recomputation is never part of `training`: utilisation (MFU) is measured in model FLOPs, so
activation checkpointing lowers it. Both agree with torch's FlopCounterMode on the real model
(`tests/apertus_model/trainer/test_flop_model.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flows.planning.estimate.memory import adapters
from specs.model import ModelSpec
from specs.stages.sft import SftSegment
from specs.stages.training import Segment

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Forward:
    """Operations of one forward pass, per token."""

    projections: int  # all matrices of the layers
    scores: int  # queries by keys, and weights by values
    output: int  # logits
    adapters: int = 0  # of LoRA


def forward(model: ModelSpec, sequence_length: int) -> Forward:
    """One forward pass over full logits."""
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    layer = 2 * (2 * model.dim * queries + 2 * model.dim * keys + 2 * model.dim * model.ffn_dim)
    return Forward(model.n_layers * layer, model.n_layers * 4 * queries * sequence_length, 2 * model.vocab_size * model.dim)


def training(segment: Segment) -> int:
    """Per token, without recomputation. With LoRA the frozen matrices have no weight gradient, and nothing
    below the first adapter of the first layer has gradients."""
    model, once = segment.model, forward(segment.model, segment.sequence_length)
    lora = segment.lora if isinstance(segment, SftSegment) else None
    if lora is None:
        return 3 * (once.projections + once.scores + once.output)
    adapted = 2 * model.n_layers * adapters(model, lora.rank, lora.targets)
    below = 0
    if {"wq", "wk", "wv"} <= set(lora.targets):
        queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
        below = 2 * model.dim * (queries + 2 * keys) + 3 * 2 * lora.rank * model.dim
    return 2 * once.projections + 3 * once.scores + 2 * once.output + 3 * adapted - below


def recomputation(segment: Segment) -> int:
    """Per token, beside `training`: recomputation in the backward pass. full: every layer; selective: keys,
    the output projection of attention and the lower half of the feed-forward, every second product; QRPO and
    DPO: always the logits."""
    model, once = segment.model, forward(segment.model, segment.sequence_length)
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    again = {
        "none": 0,
        "selective": model.n_layers * 2 * model.dim * (keys + queries + model.ffn_dim),
        "full": once.projections + once.scores,
    }[segment.activation_checkpointing]
    return again + (once.output if segment.objective in ("qrpo", "dpo") else 0)
