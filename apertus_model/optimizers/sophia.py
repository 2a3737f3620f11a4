"""Sophia-G (arXiv 2305.14342, algorithm 3): momentum over a moving estimate of the Hessian's diagonal,
clipped.

Invariant: the update depends on the gradients seen, on the squared ones that went into the estimate, and on
nothing else. Both averages and the counter that says when the next estimate is due are tensors of the state,
so that they follow a checkpoint.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from apertus_model.model.init import local_part
from apertus_model.optimizers.extra_pass import WithExtraPass
from apertus_model.optimizers.gauss_newton import drawn_labels_loss


class Sophia(WithExtraPass):
    """Update of step t, counted from 1, for gradient g and weight w:

        m = b1 m + (1 - b1) g
        w = w (1 - lr weight_decay) - lr clip(m / max(rho h, eps), -1, 1)

    and before it, in the steps 1, 1 + k, 1 + 2k, ..., h = b2 h + (1 - b2) u^2, for the gradient u of the
    extra pass. u^2 is the Gauss-Newton-Bartlett estimate (algorithm 2), including its factor B for the batch
    that u was computed on; the authors' code (Liuhong99/Sophia) multiplies rho by one `bs` (in tokens).
    That code also clips u like a gradient, and makes the first estimate after step k, from the next batch;
    here both are as in the paper. Where h is 0, the step has the size of `lr`.

    State per parameter: `step` (float32 scalar on CPU), `exp_avg` (m) and `hessian` (h), both of its shape,
    dtype and placement.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: (b1, b2).
        rho: scale of the Hessian; the larger, the fewer elements are clipped. The paper's gamma.
        hessian_interval: k, steps from one estimate to the next.
        eps: smallest denominator.
        weight_decay: decoupled, scaled by the learning rate.

    Raises:
        ValueError: a hyperparameter out of range.
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
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}")
        for name, value in {"lr": lr, "rho": rho, "weight_decay": weight_decay}.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if eps <= 0:
            raise ValueError(f"eps must be positive, got {eps}")
        if hessian_interval < 1:
            raise ValueError(f"hessian_interval must be at least 1, got {hessian_interval}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "rho": rho,
            "hessian_interval": hessian_interval,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @property
    def extra_pass_due(self) -> bool:
        """True before the steps 1, 1 + k, 1 + 2k, ..."""
        group = self.param_groups[0]
        state = self.state[group["params"][0]]
        return int(state["step"].item() if state else 0) % int(group["hessian_interval"]) == 0

    def extra_loss(self, *arguments: Any, **batch: Any) -> torch.Tensor:
        """The loss on labels that the model draws; its gradient is u."""
        return drawn_labels_loss(*arguments, **batch)

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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates the local part of every parameter that has a gradient: the update is elementwise."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        return loss

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "hessian")}
        return state
