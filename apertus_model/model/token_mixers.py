"""Chooses what mixes the tokens of a layer: attention, or what a field of `ModelSpec` puts in its place. Only
here the model's code knows which fields do; every method has a module of its own."""

from __future__ import annotations

from torchtitan.models.common.attention import GQAttention

from apertus_model.model.mamba import mixing
from apertus_model.model.sparse_attention import choosing
from specs.model import ModelSpec


def token_mixer(plain: GQAttention.Config, spec: ModelSpec, layer: int) -> GQAttention.Config:
    """The config of the token mixer of the layer with this number: one with the modules of `plain`, or
    `plain` itself."""
    if spec.attention is not None:
        return choosing(plain, spec.attention, layer)
    if spec.mamba is not None and layer in spec.mamba_layers:
        return mixing(plain, spec.mamba)
    return plain
