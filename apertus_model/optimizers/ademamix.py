"""AdEMAMix (arXiv 2409.03137): AdamW with a second, slow moving average of the gradients.

Invariant: the update depends on the gradients seen, on the parameter's own step counter and on nothing else. The counter is
part of the state, as a tensor, so that it follows a checkpoint like the moments do.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_MAX_CHUNK_ELEMENTS = 1 << 27  # bounds the temporaries of the foreach path: two of 512 MiB in float32


def scheduled_alpha(step: int, alpha: float, warmup: int) -> float:
    """Weight of the slow average at `step` (from 1): linear from 0, `alpha` from step `warmup` on."""
    return alpha * min(1.0, step / warmup) if warmup else alpha


def scheduled_beta3(step: int, beta1: float, beta3: float, warmup: int) -> float:
    """Decay of the slow average at `step` (from 1), from `beta1` to `beta3` so that its half-life grows linearly.

    The small constant in the half-life is that of the authors' code (apple/ml-ademamix) and of Megatron.
    """
    if not warmup or step >= warmup:
        return beta3

    def half_life(beta: float) -> float:
        return math.log(0.5) / math.log(beta + 1e-8) - 1

    share = step / warmup
    return 0.5 ** (1 / ((1 - share) * half_life(beta1) + share * half_life(beta3) + 1))


class AdEMAMix(Optimizer):
    """Update of step t, counted from 1, for gradient g and weight w:

        m1 = b1 m1 + (1 - b1) g          m2 = b3(t) m2 + (1 - b3(t)) g          v = b2 v + (1 - b2) g^2
        w  = w - lr ((m1 / (1 - b1^t) + alpha(t) m2) / (sqrt(v) / sqrt(1 - b2^t) + eps) + weight_decay w)

    State per parameter: `step` (float32 scalar on CPU), `exp_avg` (m1), `exp_avg_slow` (m2), `exp_avg_sq` (v), the last three
    with shape and dtype of the parameter. With `alpha=0` this is `torch.optim.AdamW`, bit by bit.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: (b1, b2, b3), b3 being the final decay of the slow average.
        alpha: final weight of the slow average.
        beta3_warmup: steps until b3 is reached; 0 switches the warm-up off.
        alpha_warmup: steps until alpha is reached; 0 switches the warm-up off.
        eps: added to the root of the second moment.
        weight_decay: decoupled, scaled by the learning rate.
        foreach: update many parameters per kernel.

    Raises:
        ValueError: a hyperparameter out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 8.0,
        beta3_warmup: int = 0,
        alpha_warmup: int = 0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        foreach: bool = True,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}")
        if min(lr, alpha, eps, weight_decay, beta3_warmup, alpha_warmup) < 0:
            raise ValueError(
                f"lr {lr}, alpha {alpha}, eps {eps}, weight_decay {weight_decay}, beta3_warmup {beta3_warmup} and "
                f"alpha_warmup {alpha_warmup} must not be negative"
            )
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "alpha": alpha,
            "beta3_warmup": beta3_warmup,
            "alpha_warmup": alpha_warmup,
            "eps": eps,
            "weight_decay": weight_decay,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_step: dict[int, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                    for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter)
                state["step"] += 1
                by_step.setdefault(int(state["step"].item()), []).append(parameter)
            for step, parameters in by_step.items():
                for chunk in _chunks(parameters, foreach=group["foreach"]):
                    self._update(chunk, group, step)
        return loss

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any], step: int) -> None:
        """Update parameters that are all at the same step, on the local part of each: the update is elementwise."""
        beta1, beta2, beta3 = group["betas"]
        lr = float(group["lr"])
        alpha = scheduled_alpha(step, group["alpha"], group["alpha_warmup"])
        beta3 = scheduled_beta3(step, beta1, beta3, group["beta3_warmup"])
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step

        weights = [_local(parameter) for parameter in parameters]
        gradients = [_local(parameter.grad) for parameter in parameters]  # checked by step
        fast, slow, square = (
            [_local(self.state[parameter][name]) for parameter in parameters] for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq")
        )
        torch._foreach_lerp_(fast, gradients, 1 - beta1)
        torch._foreach_lerp_(slow, gradients, 1 - beta3)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, gradients, gradients, 1 - beta2)

        denominator = list(torch._foreach_sqrt(square))
        torch._foreach_div_(denominator, math.sqrt(correction2))
        torch._foreach_add_(denominator, group["eps"])
        # The bias correction of the fast average is moved into the step size, as torch's AdamW does.
        numerator = list(torch._foreach_add(fast, slow, alpha=alpha * correction1)) if alpha else fast
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(weights, numerator, denominator, -lr / correction1)


def _chunks(parameters: list[torch.Tensor], *, foreach: bool) -> Iterator[list[torch.Tensor]]:
    """Parameters that are updated together: one by one, or as many as the bound on temporaries allows."""
    chunk: list[torch.Tensor] = []
    elements = 0
    for parameter in parameters:
        size = _local(parameter).numel()
        if chunk and (not foreach or elements + size > _MAX_CHUNK_ELEMENTS):
            yield chunk
            chunk, elements = [], 0
        chunk.append(parameter)
        elements += size
    if chunk:
        yield chunk


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
