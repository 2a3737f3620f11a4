"""Machine code of Triton kernels for NVIDIA GPUs that are not here.

The compiler asks a driver for its target; `compiled` is that driver. A kernel is compiled as the product's
own function launches it: with its types, constants, alignments and number of warps. Triton's wheel has the
assembler and the disassembler.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WARP = 32
VECTOR = 128  # bits: the widest load or store of these GPUs before Blackwell
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Code:
    """A kernel for one GPU."""

    kernel: str
    threads: int  # of a block
    registers: int  # of a thread
    local: int  # bytes of a thread in local memory: what registers could not hold
    shared: int  # bytes of a block
    instructions: Counter[str]

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return sum(count for name, count in self.instructions.items() if name.startswith(("LDL", "STL")))

    def widths(self, operation: str) -> Counter[int]:
        """How many instructions of a thread move how many bits: LDG loads from global memory, STG stores."""
        found = Counter[int]()
        for name, count in self.instructions.items():
            first, *marks = name.split(".")
            if first == operation:
                sizes = [int(mark.lstrip("US")) for mark in marks if mark.lstrip("US").isdecimal()]
                found[sizes[0] if sizes else 32] += count
        return found

    def blocks(self, registers: int = 65_536, warps: int = 64) -> int:
        """How many fit on a multiprocessor, by registers (handed out to warps by 256) and warps."""
        each = self.threads // WARP
        return min(registers // (-(-self.registers * WARP // 256) * 256 * each), warps // each)


class Target:
    """What the compiler asks of a driver. The device is the capability, so that each has its own cache."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, WARP)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_capability(self, *device: Any) -> tuple[int, int]:
        return divmod(self._capability, 10)

    @staticmethod
    def is_active() -> bool:
        return True


@contextlib.contextmanager
def compiled(capability: int) -> Iterator[list[Code]]:
    """Inside, kernels that are launched on meta tensors are compiled for compute capability `capability` / 10
    and do not run; each is appended to the list."""
    found: list[Code] = []
    run, active = JITFunction.run, driver._active

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binary = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        found.append(read(kernel.fn.__name__, binary.asm["cubin"], binary.metadata.num_warps))

    JITFunction.run = compile_only
    driver.set_active(Target(capability))
    try:
        yield found
    finally:
        JITFunction.run, driver._active = run, active


def read(name: str, cubin: bytes, warps: int) -> Code:
    """What the disassembler says of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _USAGE.search(_tool("cuobjdump", "--dump-resource-usage", file.name))
        assembly = _tool("nvdisasm", "-c", file.name)
    assert usage is not None
    registers, stack, shared, local = map(int, usage.groups())
    return Code(name, warps * WARP, registers, stack + local, shared, Counter(_INSTRUCTION.findall(assembly)))


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout
