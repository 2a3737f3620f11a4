"""Lets torchtitan be imported with a torch that is older than it needs.

`OLDER_TORCH`: whether this one is. FSDP, which casts the weights of torchtitan's trainer, then does not fit,
and is left out; autocast casts instead.
"""

from torch.distributed import fsdp

OLDER_TORCH = not hasattr(fsdp, "DataParallelMeshDims")
if OLDER_TORCH:
    fsdp.DataParallelMeshDims = object
