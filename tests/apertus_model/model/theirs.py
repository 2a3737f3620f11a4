"""Models of transformers with weights of our own choice."""

from typing import Any

import torch

from specs.hugging_face import hugging_face_config
from specs.model import ModelSpec


def their_config(spec: ModelSpec) -> Any:
    from transformers import ApertusConfig

    return ApertusConfig(
        **hugging_face_config(
            spec, max_position_embeddings=65_536, bos_token_id=1, eos_token_id=2, pad_token_id=3
        )
    )


def random_weights(sizes: dict[str, torch.Size], seed: int = 0) -> dict[str, torch.Tensor]:
    """Matrices that keep the size of what goes through them; norms about 1; xIELU scalars anywhere between
    -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sizes.items():
        value = torch.randn(shape, generator=generator)
        if name.endswith((".alpha_p", ".alpha_n")):
            value = value.tanh_()
        elif len(shape) == 1:
            value = value.mul_(0.2).add_(1)
        else:
            value = value.mul_(shape[1] ** -0.5)
        weights[name] = value
    return weights
