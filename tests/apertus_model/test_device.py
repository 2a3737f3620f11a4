"""torchtitan computes on one device, and kernels run where they can."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torchtitan.tools.utils

from apertus_model import device


def test_every_module_of_torchtitan_computes_on_the_device_of_the_shim() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    for name in (
        "torchtitan.distributed.utils",
        "torchtitan.distributed.parallel_dims",
        "torchtitan.tools.utils",
    ):
        assert importlib.import_module(name).device_type == expected, name
    assert torchtitan.tools.utils.device_module.get_device_properties(None).total_memory > 2**28


def test_kernels_run_on_a_gpu_in_the_dtypes_of_training_and_not_while_torch_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has(dtype: torch.dtype, is_cuda: bool = True) -> bool:
        return device.has_kernels(SimpleNamespace(is_cuda=is_cuda, dtype=dtype))  # type: ignore[arg-type]

    assert has(torch.bfloat16) and has(torch.float32)
    assert not has(torch.float64) and not has(torch.bfloat16, is_cuda=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not has(torch.bfloat16)


@pytest.mark.slow
def test_importing_the_engine_prints_nothing() -> None:
    """With torchao installed, too, whose libraries are of other builds of torch."""
    command = [sys.executable, "-c", "import apertus_model.trainer.config"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
