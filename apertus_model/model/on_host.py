"""Arguments of a model that the host reads while the GPU computes.

When the host reads a number from the GPU, it waits until all work before it is computed. Labels and positions
are made on the host; what the host has to know of them, such as the number of kept labels, is read before
they are copied.
"""

from dataclasses import dataclass

import torch
from torch.utils._pytree import register_pytree_node


@dataclass(frozen=True, eq=False)
class OnHost:
    """A tensor in the host's memory among the arguments of a model. FSDP copies tensors to its device, but
    not this class; a pipeline cuts it into micro-batches like a tensor."""

    tensor: torch.Tensor


register_pytree_node(OnHost, lambda value: ([value.tensor], None), lambda parts, _: OnHost(*parts))


def host_tensor(value: torch.Tensor | OnHost) -> torch.Tensor:
    """The tensor itself, on the device that it is on."""
    return value.tensor if isinstance(value, OnHost) else value


def copy_to(value: torch.Tensor | OnHost, device: torch.device) -> torch.Tensor:
    """The tensor on `device`. The host does not wait for the copy."""
    return host_tensor(value).to(device, non_blocking=True)
