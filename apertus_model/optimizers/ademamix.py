"""AdEMAMix (arXiv 2409.03137): AdamW with a second, slow moving average of the gradients.

Invariant: the update depends on the gradients seen, on the parameter's own step counter and on nothing else.
The counter is part of the state, as a tensor, so that it follows a checkpoint like the moments do.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from apertus_model.device import has_kernels
from apertus_model.model.init import local_part, owned_region
from apertus_model.optimizers.rounding import round_stochastically, rounding_seed
from specs.capabilities import OPTIMIZERS

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_slow", "exp_avg_sq")


def scheduled_alpha(step: int, alpha: float, warmup: int) -> float:
    """Weight of the slow average at `step` (from 1): linear from 0, `alpha` from step `warmup` on."""
    return alpha * min(1.0, step / warmup) if warmup else alpha


def scheduled_beta3(step: int, beta1: float, beta3: float, warmup: int) -> float:
    """Decay of the slow average at `step` (from 1), from `beta1` to `beta3` so that its half-life grows
    linearly. The small constant in the half-life is that of apple/ml-ademamix and Megatron."""
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

    State per parameter: `step` (float32 scalar on CPU), `exp_avg` (m1), `exp_avg_slow` (m2), `exp_avg_sq`
    (v), the last three in the parameter's shape. Everything is computed in float32 (float64 for float64
    weights) and rounded once, when it is stored: weights to nearest, bfloat16 moments stochastically
    (`rounding`). Rounding to nearest would lose most updates of m2 and v, which are smaller than half the
    spacing of bfloat16: on the noisy quadratic of the tests it ends at twice the loss of float32, stochastic
    rounding at 1.002 times. With `alpha=0` and float32 this is `torch.optim.AdamW`, bit by bit.

    Args:
        betas: (b1, b2, b3), b3 being the final decay of the slow average.
        alpha: final weight of the slow average.
        beta3_warmup, alpha_warmup: steps until b3 and alpha are reached; 0 switches a warm-up off.
        fused: update a parameter in one pass, by a Triton kernel, on CUDA only. None: if all parameters of
            the group can use it.
        state_dtype: of the moments; None for that of the parameter.
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
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "alpha": alpha,
            "beta3_warmup": beta3_warmup,
            "alpha_warmup": alpha_warmup,
            "eps": eps,
            "weight_decay": weight_decay,
            "fused": fused,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            if group["fused"] is None:
                group["fused"] = all(map(has_kernels, group["params"]))
        implementations = {"Triton kernel" if group["fused"] else "foreach" for group in self.param_groups}
        logger.info("AdEMAMix uses: %s", ", ".join(sorted(implementations)))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates every parameter that has a gradient."""
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
            # Parameters updated together need equal step counters; one without gradient in some steps lags.
            by_step: dict[int, list[tuple[str, torch.Tensor]]] = {}
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                    for moment in MOMENTS:
                        state[moment] = torch.zeros_like(parameter, dtype=group["state_dtype"])
                state["step"] += 1
                by_step.setdefault(int(state["step"].item()), []).append((name, parameter))
            for step, parameters in by_step.items():
                for chunk in _chunks(parameters):
                    self._update(chunk, group, step)

    def _update(self, named: list[tuple[str, torch.Tensor]], group: dict[str, Any], step: int) -> None:
        """Updates the local parts of parameters that are all at the same step: the update is elementwise."""
        parameters = [parameter for _, parameter in named]
        beta1, beta2, beta3 = group["betas"]
        lr = float(group["lr"])
        alpha = scheduled_alpha(step, group["alpha"], group["alpha_warmup"])
        beta3 = scheduled_beta3(step, beta1, beta3, group["beta3_warmup"])
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step

        weights = [local_part(parameter) for parameter in parameters]
        gradients = [local_part(parameter.grad) for parameter in parameters]  # checked by step
        moments = [[local_part(self.state[parameter][name]) for parameter in parameters] for name in MOMENTS]
        if group["fused"]:
            from apertus_model.optimizers.ademamix_triton import update

            for index, (name, parameter) in enumerate(named):
                update(
                    weights[index], gradients[index], *(moment[index] for moment in moments),
                    lr=lr, betas=(beta1, beta2, beta3), alpha=alpha, corrections=(correction1, correction2),
                    eps=group["eps"], weight_decay=group["weight_decay"],
                    rounding=self._roundings(name, parameter, step),
                )  # fmt: skip
            return

        weight, gradient, fast, slow, square = (
            _upcast(tensors, weights) for tensors in (weights, gradients, *moments)
        )
        torch._foreach_lerp_(fast, gradient, 1 - beta1)
        torch._foreach_lerp_(slow, gradient, 1 - beta3)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, gradient, gradient, 1 - beta2)

        denominator = list(torch._foreach_sqrt(square))
        torch._foreach_div_(denominator, math.sqrt(correction2))
        torch._foreach_add_(denominator, group["eps"])
        # The bias correction of the fast average is moved into the step size, as torch's AdamW does.
        numerator = list(torch._foreach_add(fast, slow, alpha=alpha * correction1)) if alpha else fast
        torch._foreach_mul_(weight, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(weight, numerator, denominator, -lr / correction1)

        for index, (name, parameter) in enumerate(named):
            if weight[index] is not weights[index]:
                weights[index].copy_(weight[index])
            if fast[index] is not moments[0][index]:
                seeds, offset, row = self._roundings(name, parameter, step)
                for seed, stored, values in zip(seeds, moments, (fast, slow, square), strict=True):
                    value = values[index]
                    if stored[index].dtype == torch.bfloat16:
                        value = round_stochastically(value.float().contiguous(), seed, offset, row)
                    stored[index].copy_(value)

    def _roundings(self, name: str, parameter: torch.Tensor, step: int) -> tuple[list[int], int, int]:
        """The seed of each moment's rounding, the index of the first element of this process's part in the
        whole tensor, and the length of a whole row."""
        if self.state[parameter][MOMENTS[0]].dtype != torch.bfloat16:
            return [0] * len(MOMENTS), 0, 0
        offset = 0
        for begin, size in zip(owned_region(parameter)[0], parameter.shape, strict=True):
            offset = offset * size + begin
        seeds = [rounding_seed(name, step, moment) for moment in range(len(MOMENTS))]
        return seeds, offset, parameter.shape[-1] if parameter.ndim else 0


def _upcast(tensors: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the precision of the computation (float32, or float64 for float64 weights). A tensor
    that already has it is returned itself, not a copy."""
    return [
        tensor.to(torch.promote_types(weight.dtype, torch.float32))
        for tensor, weight in zip(tensors, weights, strict=True)
    ]


def _chunks(named: list[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yields the parameters that are updated together: as many as the bound on temporaries allows."""
    chunk: list[tuple[str, torch.Tensor]] = []
    elements, largest = 0, OPTIMIZERS["ademamix"].chunk or 0
    for name, parameter in named:
        size = local_part(parameter).numel()
        if chunk and elements + size > largest:
            yield chunk
            chunk, elements = [], 0
        chunk.append((name, parameter))
        elements += size
    if chunk:
        yield chunk
