"""Lets torchtitan 0.3.0 train on one process with a torch before 2.13, as some machines have (tried: 2.11).

Invariant: an argument that such a torch does not take is left out where that torch does so anyway:
variable-length attention takes fewer key heads than query heads and does not split keys, and masks keep full
blocks apart. torchtitan's FSDP can be imported, but fails when it is used.
"""

from collections.abc import Callable
from typing import Any

import torch

OLDER_TORCH = torch.__version__ < (2, 13)  # FSDP is not imported to see it: that takes half a second


def without(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A function that drops these arguments of the function."""

    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **{name: value for name, value in options.items() if name not in names})

    return call


if OLDER_TORCH:
    from torch.distributed import fsdp

    fsdp.DataParallelMeshDims = object
    import torchtitan.models.common.attention as titan

    titan.varlen_attn = without(titan.varlen_attn, "num_splits", "enable_gqa")
    create_block_mask = without(titan.create_block_mask, "separate_full_blocks")
    titan._compiled_create_block_mask = torch.compile(create_block_mask)
