"""Rotary embedding of Apertus: rotate-half layout with Llama-3 frequency scaling.

torchtitan's `ComplexRoPE` scales but interleaves the two halves of a head; its `CosSinRoPE` rotates halves but refuses to
scale. This one does both, so that query and key weights have the layout of the Hugging Face checkpoint and no permutation
exists anywhere.
"""

import math
from dataclasses import dataclass

import torch
from torchtitan.models.common import CosSinRoPE


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
    """Cosines and sines for positions 0 .. max_seq_len - 1, computed in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        """Cache of shape (max_seq_len, 2 * head_dim): cosines, then sines, each half repeated."""
        frequencies = llama3_inverse_frequencies(self.config)
        positions = torch.arange(self.config.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)
