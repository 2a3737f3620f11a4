"""Initial weights that do not depend on the parallel layout.

Invariant: the value of every element is a pure function of (seed, parameter name, element index). A parameter
is cut into fixed blocks of rows; each block has a generator of its own, seeded by a hash of (seed, name,
block), and a rank draws only the blocks that it owns a part of. torch's own depends on the layout.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torchtitan.components.checkpointer.utils import canonical_fqn

from apertus_model.model.feed_forward import INITIAL_ALPHA_N, INITIAL_ALPHA_P

_BLOCK_ELEMENTS = 1 << 16
_OUTPUT_PROJECTIONS = ("attention.wo.weight", "feed_forward.down_proj.weight")


def initialise_parameters(model: nn.Module, *, seed: int, std: float, n_layers: int) -> None:
    """Fills every parameter in place, as in the Apertus recipe (section 1, initialisation).

    Matrices are normal with `std`, the output projections of attention and feed-forward with `std / sqrt(2
    n_layers)`; norm weights are 1; the xIELU scalars start at softplus^-1(0.8) and softplus^-1(0.3). In an
    adapter (LoRA), B is zero and A is normal with 1 / sqrt(3 in_features), the standard deviation of the
    uniform values in its authors' code. A weighted sum of states (`layer_schedule`) initially selects the
    last of them. A module's method `initial` states initial values of its own parameters.

    `model`: model or pipeline part; parameters may be plain tensors or DTensors on any layout, never meta.
    `n_layers`: depth of the whole model.
    """
    output_std = std / math.sqrt(2 * n_layers)
    with torch.no_grad():
        for wrapped_name, parameter in model.named_parameters():
            name = canonical_fqn(wrapped_name)
            owner, _, own_name = wrapped_name.rpartition(".")
            module = model.get_submodule(owner)
            if hasattr(module, "initial"):
                whole = module.initial(own_name, parameter.shape, generator_of(seed, name, 0))
                if whole is not None:
                    for dimension, (start, size) in enumerate(zip(*owned_region(parameter), strict=True)):
                        whole = whole.narrow(dimension, start, size)
                    local_part(parameter).copy_(whole)
                    continue
            if name.endswith(".alpha_p"):
                local_part(parameter).fill_(INITIAL_ALPHA_P)
            elif name.endswith(".alpha_n"):
                local_part(parameter).fill_(INITIAL_ALPHA_N)
            elif name.endswith(".lora_b.weight"):
                local_part(parameter).zero_()
            elif name.endswith(".lora_a.weight"):
                fill_normal(parameter, name, seed=seed, std=1 / math.sqrt(3 * parameter.shape[1]))
            elif name.startswith("schedule.sums."):
                select_last(parameter)
            elif parameter.ndim == 1:
                local_part(parameter).fill_(1.0)
            else:
                fill_normal(
                    parameter, name, seed=seed, std=output_std if name.endswith(_OUTPUT_PROJECTIONS) else std
                )


def select_last(parameter: torch.Tensor) -> None:
    """Fills a vector, or the part of it that this rank owns, with zeros and a final 1."""
    local = local_part(parameter).zero_()
    (start,), (size,) = owned_region(parameter)
    if size and start + size == parameter.numel():
        local[-1] = 1.0


def fill_normal(parameter: torch.Tensor, name: str, *, seed: int, std: float) -> None:
    """Fills a matrix (tensor or DTensor), or the part of it that this rank owns, with normal values of mean
    0. `name`: fully qualified, part of the seed of every block."""
    rows, columns = parameter.shape
    rows_per_block = max(1, _BLOCK_ELEMENTS // columns)
    local = local_part(parameter)
    (row_start, column_start), (local_rows, local_columns) = owned_region(parameter)
    row_end = row_start + local_rows
    for block in range(row_start // rows_per_block, math.ceil(row_end / rows_per_block)):
        first = block * rows_per_block
        generator = generator_of(seed, name, block)
        values = torch.empty(min(rows_per_block, rows - first), columns).normal_(
            0.0, std, generator=generator
        )
        begin, end = max(first, row_start), min(first + len(values), row_end)
        local[begin - row_start : end - row_start].copy_(
            values[begin - first : end - first, column_start : column_start + local_columns]
        )


def generator_of(*key: object) -> torch.Generator:
    """A generator of its own for each key, seeded by a hash."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter; the parameter itself if it is not sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def owned_region(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size of this rank's part of a parameter, as the checkpoint writer sees them."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim, tuple(parameter.shape)
    (chunk,) = parameter.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def sum_over_shards(own: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The sum, over a tensor's different shards, of what each rank computed from its own. Collective."""
    added = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    return DTensor.from_local(own, mesh, added, run_check=False).full_tensor()
