"""Rotary position embedding (arXiv 2104.09864): its frequencies, and the rotation as an operator, which is
the formula in PyTorch, and on CUDA a Triton kernel that reads and writes memory once.

The halves of a head are the two coordinates of its planes: with angles t and a vector (a, b),

    rotated = (a cos t - b sin t, b cos t + a sin t)

computed in float32. The gradient is rotated back, so nothing is kept for the backward pass.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torchtitan.models.common import CosSinRoPE

from apertus_model.device import has_kernels
from specs.model import ModelSpec


@torch.library.custom_op("apertus::rotate", mutates_args=())
def rotate(x: Tensor, table: Tensor, back: bool) -> Tensor:
    """Rotates `x` (batch, length, heads, 2 h), or rotates it back. `table`: float32 (batch or 1, length, 1, 4
    h), with h cosines for each position, the same cosines again, h sines and the same sines again.
    Differentiable with respect to `x`, any number of times."""
    cosine, _, sine, _ = table.chunk(4, dim=-1)
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    if back:
        sine = -sine
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)


@rotate.register_kernel("cuda")
def _(x: Tensor, table: Tensor, back: bool) -> Tensor:
    from apertus_model.model.rotation_triton import rotated

    return rotated(x, table, back)


@rotate.register_fake
def _(x: Tensor, table: Tensor, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    _, table, ctx.back = inputs
    ctx.save_for_backward(table)


rotate.register_autograd(
    lambda ctx, gradient: (rotate(gradient, *ctx.saved_tensors, not ctx.back), None, None),
    setup_context=_save,
)


@register_sharding(torch.ops.apertus.rotate.default)
def _(x: Any, table: Any, back: bool) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Lets DTensors be split by heads."""
    return [([split], [split, Replicate(), None]) for split in (Replicate(), Shard(2))]


def llama3_inverse_frequencies(config: CosSinRoPE.Config) -> torch.Tensor:
    """Inverse frequencies, float32 of shape (head_dim / 2,).

    Wavelengths above `original_max_position / low_freq_factor` are stretched by `scaling_factor`, those below
    `original_max_position / high_freq_factor` are kept, and those between are interpolated (Llama 3.1).
    """
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.scaling == "none":
        return frequencies
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / config.scaling_factor + smooth * frequencies


class Llama3RoPE(CosSinRoPE):
    """Rotary embedding in the rotate-half layout, with Llama-3 frequency scaling: cosines and sines for
    positions 0 .. max_seq_len - 1, computed in float32.

    torchtitan's `ComplexRoPE` scales but interleaves the two halves of a head; its `CosSinRoPE` rotates
    halves but refuses to scale. Here query and key weights have the layout of the Hugging Face checkpoint, so
    that no permutation exists anywhere.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        """Cache of shape (max_seq_len, 2 * head_dim): cosines, then sines, each half repeated."""
        if torch.get_default_device().type == "meta":  # the meta device has shapes, but no values
            return torch.empty(self.config.max_seq_len, 2 * self.config.dim)
        frequencies = llama3_inverse_frequencies(self.config)
        positions = torch.arange(self.config.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries and keys by rows of the cache, as torchtitan does; on a GPU by a kernel."""
        if has_kernels(query):
            return rotate(query, rope_cache, False), rotate(key, rope_cache, False)
        return CosSinRoPE.apply_rotary_emb(query, key, rope_cache)


def rope_config(spec: ModelSpec, sequence_length: int) -> Llama3RoPE.Config:
    """The rotary embedding of a spec, for positions below `sequence_length`."""
    plain: dict[str, Any] = {"dim": spec.head_dim, "max_seq_len": sequence_length, "theta": spec.rope_theta}
    if (scaling := spec.rope_scaling) is None:
        return Llama3RoPE.Config(**plain)
    return Llama3RoPE.Config(
        **plain,
        scaling="llama",
        scaling_factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.original_max_position,
    )
