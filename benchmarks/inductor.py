"""What torch.compile's kernels move, counted without a GPU: `python -m benchmarks.inductor` prints JSON.

A part of `benchmarks.kernels`, in a process of its own, since a CUDA without a device is loaded before torch.
Inductor fuses the operators of a formula for an H100; each of its kernels says which buffers it reads and
writes. Nothing is compiled to machine code, and nothing runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from apertus_model.rehearsal import fake_cuda

ELEMENTS = 1 << 24
FACTS = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448, shared_memory_per_block=49152,
    shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip


def pretend() -> None:
    """An H100 for Inductor. Called before torch is imported."""
    fake_cuda.load()
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from triton.runtime import driver

    from apertus_model.rehearsal import patches
    from apertus_model.rehearsal.rates import Rates
    from benchmarks.kernel_code import Target

    patches.apply(patches.cuda(Rates("H100", 8), torch.Stream(device="cuda:0")))
    torch.cuda.get_device_properties = lambda *args: FACTS
    torch.version.cuda = torch.version.cuda or "13.0"
    CudaInterface.get_device_properties = staticmethod(lambda *args: FACTS)
    CudaInterface.is_available = staticmethod(lambda: True)
    CudaInterface.get_compute_capability = staticmethod(lambda *args: 90)
    CudaInterface.current_device = staticmethod(lambda: 0)
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *args: FACTS)
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)
    driver.set_active(Target(90))


def moved(function: Callable[..., Any], arguments: list[Any]) -> int:
    """Bytes that Inductor's kernels of a function read and write."""
    import torch
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [torch.empty(argument.shape, dtype=argument.dtype, device="cuda") for argument in arguments]
        traced = make_fx(
            torch.func.functionalize(function), decomposition_table=select_decomp_table(),
            tracing_mode="fake", _allow_non_fake_inputs=True,
        )  # fmt: skip
        graph = traced(*inputs)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering = GraphLowering(graph, shape_env=mode.shape_env)
        with mode, V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering._update_scheduler()
            return sum(node.get_read_write_buffers_sizes() for node in lowering.scheduler.nodes)


def main() -> None:
    """Bytes per element of formulas, by name of the case."""
    pretend()
    from benchmarks.kernels import CASES

    found = {}
    for case in CASES:
        if case.formula is not None:
            arguments = case.make(ELEMENTS, "meta")
            found[case.name] = moved(case.formula, arguments) / arguments[0].numel()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
