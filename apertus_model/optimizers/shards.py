"""What this process holds of a tensor that may be spread over several."""

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of this process, in place; the tensor itself where it is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def region(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size of that part in the whole tensor, as the checkpoint writer sees them."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)
