"""A linear layer that multiplies in MXFP8. Importing this module imports torchao."""

from dataclasses import dataclass

from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.components.quantization.mx import MXFP8Linear

from apertus_model.device import has_gpu


class BlockLinear(MXFP8Linear):
    """torchtitan's layer, emulated without a GPU, for which torchtitan 0.3.0 has no setting."""

    @dataclass(kw_only=True, slots=True)
    class Config(MXFP8Linear.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not has_gpu():
            self.kernel_preference = KernelPreference.EMULATED
