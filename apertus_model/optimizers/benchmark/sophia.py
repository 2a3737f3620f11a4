"""Sophia-G (arXiv 2305.14342, algorithm 3): momentum over an estimate of the Hessian's diagonal, clipped.

The estimate is that of Gauss, Newton and Bartlett (algorithm 2), from the gradients of an extra pass. For a
loss sum_i w_i ce_i / W over tokens i, W the sum of the weights w_i of the step, the diagonal of the
Gauss-Newton matrix is sum_i w_i E[(d ce_i)^2] / W, with labels from the model's own distribution. Draws are
independent and a gradient d ce_i is 0 on average, so the square of

    u = d/dw sum_i sqrt(w_i) ce_i(drawn label) / sqrt(W)

has that expectation. With w_i = 1 and W = B kept tokens it is the paper's B (d mean ce)^2. It covers all kept
tokens of the step.

Invariants:
- The update depends on the gradients seen, on the squared ones that went into the estimate, and on nothing
  else. Both averages and the counter that says when the next estimate is due are tensors of the state, so
  that they follow a checkpoint.
- The label drawn for a token depends on the model, the step and the token's place in the step's batch
  (`losses.drawn_labels`).
"""

import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from apertus_model.hashing import signed
from apertus_model.losses.cross_entropy import LastStates, cross_entropy
from apertus_model.losses.drawn_labels import draw_labels
from apertus_model.model.init import local_part
from apertus_model.optimizers.hook import ExtraLoss, Hooked


def drawn_labels_loss(
    states: LastStates, *, step: int, weights: torch.Tensor, places: torch.Tensor, denominator: torch.Tensor
) -> torch.Tensor:
    """The loss whose gradient, summed over micro-batches and ranks, is u. Arguments: `hook.ExtraLoss`."""
    seed = signed(zlib.crc32(f"labels/{step}".encode()))
    drawn = draw_labels(states, places, seed)
    return cross_entropy(states._replace(labels_BL=drawn), denominator.sqrt(), weights.sqrt())


class Sophia(Hooked):
    """Update of step t, counted from 1, for gradient g and weight w:

        m = b1 m + (1 - b1) g
        w = w (1 - lr weight_decay) - lr clip(m / max(rho h, eps), -1, 1)

    and before it, in the steps 1, 1 + k, 1 + 2k, ..., h = b2 h + (1 - b2) u^2, for the gradient u of the
    extra pass. u^2 is the Gauss-Newton-Bartlett estimate, including its factor B for the batch that u was
    computed on; the authors' code (Liuhong99/Sophia) multiplies rho by one `bs` (in tokens).
    That code also clips u like a gradient, and makes the first estimate after step k, from the next batch;
    here both are as in the paper. Where h is 0, the step has the size of `lr`.

    State per parameter: `step` (float32 scalar on CPU); `exp_avg` (m) and `hessian` (h), laid out like it.

    Args:
        rho: scale of the Hessian; the larger, the fewer elements are clipped. The paper's gamma.
        hessian_interval: k, steps from one estimate to the next.
        eps: smallest denominator.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.965, 0.99),
        rho: float = 0.04,
        hessian_interval: int = 10,
        eps: float = 1e-15,
        weight_decay: float = 0.1,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "rho": rho, "hessian_interval": hessian_interval, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})

    @property
    def extra_pass_due(self) -> bool:
        """True before the steps 1, 1 + k, 1 + 2k, ..."""
        group = self.param_groups[0]
        state = self.state[group["params"][0]]
        return int(state["step"].item() if state else 0) % int(group["hessian_interval"]) == 0

    def before_step(self, step: int, extra_pass: Callable[[ExtraLoss], None]) -> None:
        if self.extra_pass_due:
            extra_pass(partial(drawn_labels_loss, step=step))
            self.take_extra_gradients()

    @torch.no_grad()
    def take_extra_gradients(self) -> None:
        """Adds the squares of the gradients to the moving average h."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = local_part(parameter.grad)
                    hessian = local_part(self._state(parameter)["hessian"])
                    hessian.mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1 - group["betas"][1])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates the local part of every parameter that has a gradient: the update is elementwise."""
        for group in self.param_groups:
            lr = float(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._state(parameter)
                state["step"] += 1
                momentum = local_part(state["exp_avg"]).lerp_(
                    local_part(parameter.grad), 1 - group["betas"][0]
                )
                scale = (local_part(state["hessian"]) * group["rho"]).clamp_(min=group["eps"])
                update = torch.div(momentum, scale, out=scale).clamp_(-1, 1)
                local_part(parameter).mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "hessian")}
        return state
