"""Linear layers that multiply in float8, by torchao.

    y = (x s_x as float8) (W s_w as float8) / (s_x s_w)        s = 448 / largest |value|

The two products of the backward pass are computed alike, with the gradient of y in place of x or W. `float8`
has one scale per tensor, and gradients in e5m2 (57,344 in place of 448); `float8-rowwise` has one scale, a
power of two, for each row (or column) that is summed over, and e4m3 throughout. `mxfp8` has one scale for
each 32 elements of such a row (the format of OCP Microscaling 1.0, whose 8 bits hold 1 / s): the largest
power of two with which no element is above 448. That is NVIDIA's rule; OCP's lets elements saturate. Scales
are taken from the values when these are multiplied.

Invariants: weights, their names, gradients and everything stored stay in their own precision. The bits of
float8 operands depend on the micro-batch, since a tensor's scale depends on all of its values.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torchtitan.models.common import Linear
from torchtitan.tools.utils import has_cuda_capability, has_rocm_capability

from apertus_model.device import has_gpu

logger = logging.getLogger(__name__)

RECIPES = {"float8": "tensorwise", "float8-rowwise": "rowwise"}  # torchao's names


class Float8Error(ValueError):
    """Float8 cannot run in this process; the message says why, and what can."""


def linear_config(precision: str, *, compiled: bool = False) -> Callable[..., Linear.Config]:
    """The function that makes the config of a linear layer, for `Precision.linear` of a recipe. Float8Error
    when float8 cannot run here."""
    if precision == "param":
        return Linear.Config
    if importlib.util.find_spec("torchao") is None:
        raise Float8Error("precision.linear needs the package torchao (pip install apertus[float8])")
    emulated = not has_gpu()
    if emulated and compiled:
        raise Float8Error(
            f"precision.linear: {precision} is emulated without a GPU, and torchao cannot compile that; leave"
            " out compile"
        )
    if precision == "mxfp8":
        if not emulated and not has_cuda_capability(10, 0):
            raise Float8Error(
                "precision.linear: mxfp8 needs a GPU with MX formats, of compute capability 10.0 or above"
                f" (B200, GB200), and this one is {torch.cuda.get_device_name()}; set linear: param"
            )
        from apertus_model.model.mxfp8 import BlockLinear

        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        known = hasattr(torch.ops.torchao, "mxfp8_quantize")
        if not emulated and not (known and has_kernel("torchao::mxfp8_quantize", "CUDA")):
            raise Float8Error(
                "precision.linear: mxfp8 needs kernels that torchao 0.18 has on x86-64 alone, and there are"
                " none here; set linear: param"
            )
        logger.info("linear layers multiply in mxfp8%s", ", emulated" if emulated else "")
        return BlockLinear.Config
    if not emulated and not (has_cuda_capability(8, 9) or has_rocm_capability(9, 4)):
        raise Float8Error(
            f"precision.linear: {precision} needs a GPU with float8, of compute capability 8.9 or above"
            f" (H100, B200, MI300X), and this one is {torch.cuda.get_device_name()}; set linear: param"
        )
    from torchao.float8 import Float8LinearConfig
    from torchtitan.components.quantization.float8 import Float8Linear

    if precision == "float8-rowwise":  # as torchtitan 0.3.0's converter does: pytorch issue 150859
        torch._inductor.config.emulate_precision_casts = True
    # torchtitan 0.3.0's converter drops the recipe when it emulates
    recipe = replace(Float8LinearConfig.from_recipe_name(RECIPES[precision]), emulate=emulated)
    logger.info("linear layers multiply in %s%s", precision, ", emulated" if emulated else "")
    return partial(Float8Linear.Config, _torchao_config=recipe)
