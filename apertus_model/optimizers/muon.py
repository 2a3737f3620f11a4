"""torch's Muon for matrices that are sharded over processes.

Invariant: the update of a matrix equals that of `torch.optim.Muon` on the whole matrix. Only the
orthogonalisation needs the whole update: it is gathered once, in bfloat16, and each process orthogonalises
all of it and keeps its own part, as in Moonlight (arXiv 2502.16982, algorithm 1). torch's own step gives the
same result on DTensors with about thirty collectives per matrix.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from apertus_model.model.init import local_part, owned_region


class Muon(torch.optim.Muon):
    """Muon for sharded matrices. State per matrix: `momentum_buffer`, of the matrix's shape, dtype and
    placement. The arguments are those of `torch.optim.Muon`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates every matrix that has a gradient. Collective if matrices are sharded."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                average = state["momentum_buffer"]
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = _orthogonal(
                    matrix.grad.lerp(average, group["momentum"]) if group["nesterov"] else average, group
                )
                rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
                local_part(matrix).mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-rate)


def _orthogonal(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """This process's part of the orthogonalised update, bfloat16."""
    whole = update.bfloat16()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    result = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
    (row, column), (rows, columns) = owned_region(update)
    return result[row : row + rows, column : column + columns]
