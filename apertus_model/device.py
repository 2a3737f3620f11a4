"""The CPU shim for torchtitan, and the only module that checks for a GPU.

torchtitan 0.3.0 takes its device from `torchtitan.tools.utils.device_type` / `device_module` at import time
and knows no CPU. Without an accelerator, importing this module puts a CPU stand-in there, before any other
torchtitan module copies the names.

Invariant: after `install`, every torchtitan module of this process agrees on one device.
"""

import logging
import os
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torchtitan.tools.utils as titan_utils
from torch.distributed.distributed_c10d import _set_pg_timeout

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

KERNEL_DTYPES = (torch.float32, torch.bfloat16)


class CpuDeviceModule(ModuleType):
    """`torch.cpu` with the few functions of `torch.cuda` that torchtitan calls unconditionally."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        """The name shown in logs."""
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Properties with `total_memory` in bytes: the physical memory of the machine."""
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Allocator counters; the CPU allocator has none, so they are zero."""
        names = "active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"
        return dict.fromkeys(names, 0)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Nothing to reset on CPU."""

    def empty_cache(self) -> None:
        """Nothing to empty on CPU."""


def has_gpu() -> bool:
    """Whether this process computes on an accelerator."""
    return torch.cuda.is_available()


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. None of them is opened."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [name for name in named.split(",") if name][:count] if named else [str(n) for n in range(count)]


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether the project's Triton kernels run on a tensor now. While torch.compile traces, formulas are
    used: the compiler's kernels move as little data (`benchmarks.kernels`), and are fused with neighbours."""
    return tensor.is_cuda and tensor.dtype in KERNEL_DTYPES and not torch.compiler.is_compiling()


def install() -> None:
    """Point torchtitan at the CPU when there is no accelerator, and keep its imports quiet. RuntimeError when
    another torchtitan module was imported first and has copied the wrong device."""
    for name in ("torchao", "torch.utils._pytree"):  # they would log while torchtitan imports torchao
        logging.getLogger(name).setLevel(logging.ERROR)
    if has_gpu() or titan_utils.device_type == "cpu":
        return
    if "torchtitan.distributed.utils" in sys.modules:
        raise RuntimeError(
            "torchtitan was imported before apertus_model.device: import apertus_model.device first"
        )
    titan_utils.device_type = "cpu"
    titan_utils.device_module = CpuDeviceModule("apertus_cpu_device")


def set_collective_timeout(timeout: timedelta, parallel_dims: "ParallelDims") -> None:
    """Set the timeout of all process groups, after a barrier: otherwise a rank that is ahead would wait for
    slow ones under the new timeout. torchtitan 0.3.0's own function calls `torch.distributed.set_timeout`,
    which torch 2.13 does not have, and passes device ids to the barrier, which gloo refuses."""
    torch.distributed.barrier()
    for mesh in parallel_dims.get_all_one_dimensional_meshes().values():
        _set_pg_timeout(timeout, mesh.get_group())
    _set_pg_timeout(timeout)


install()
