"""The machine code of every Triton kernel, compiled as the product launches it, for GPUs that are not
here."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from apertus_model.losses import softmax_triton
from apertus_model.model import xielu_triton
from apertus_model.optimizers import ademamix_triton
from benchmarks.kernel_code import TOOLS, VECTOR, Code, compiled
from benchmarks.kernels import CASES

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = {80: "A100", 90: "H100", 100: "B200"}
# Bytes on their way to a multiprocessor when memory is never idle (Little's law): its rate times the time of
# a load, 3.35 TB/s x 0.7 microseconds / 132 = 18,000 for an H100, and 8 TB/s x 0.7 / 148 for a B200.
ON_THEIR_WAY = 38_000
ADDERS = ("_xielu_totals",)  # add what the blocks of another kernel left: two blocks, whatever the size
# elements of a block of kernels without a loop
BLOCKS = {
    "_ademamix": ademamix_triton._BLOCK,
    "_xielu_forward": xielu_triton._BLOCK,
    "_xielu_backward": xielu_triton._BLOCK,
    "_to_gradient": softmax_triton._BLOCK,
}
# Loads and stores of single numbers: the two scalars of xIELU, and a sum of a block for each; the largest
# logit of a row and its sum; its label, and what its gradient follows from.
SINGLE = {"xIELU": 2, "softmax, sums": 2, "softmax, gradient": 4}

pytestmark = pytest.mark.skipif(
    not all((TOOLS / name).exists() for name in ("ptxas", "cuobjdump", "nvdisasm")),
    reason="this build of triton has no assembler and disassembler for NVIDIA GPUs",
)


@cache
def codes(case: int, capability: int) -> list[Code]:
    arguments = CASES[case].make(1 << 20, "meta")
    with compiled(capability) as found:
        CASES[case].launch(*arguments)
    return found


each_case = pytest.mark.parametrize("case", range(len(CASES)), ids=[case.name for case in CASES])
each_gpu = pytest.mark.parametrize(
    "capability",
    [
        pytest.param(number, id=name, marks=[] if number == 90 else pytest.mark.slow)
        for number, name in CAPABILITIES.items()
    ],
)


@each_gpu
@each_case
def test_registers_suffice_and_memory_moves_in_vectors(case: int, capability: int) -> None:
    for code in codes(case, capability):
        assert code.local == code.spills == 0
        for operation in ("LDG", "STG"):
            narrow = {bits: number for bits, number in code.widths(operation).items() if bits < VECTOR}
            single = max((most for name, most in SINGLE.items() if name in CASES[case].name), default=0)
            assert sum(narrow.values()) <= single, (operation, narrow)
        vectors = code.widths("LDG")[VECTOR] + code.widths("STG")[VECTOR]
        assert vectors
        if code.kernel in BLOCKS:  # each element is read and written once
            assert vectors * VECTOR // 8 * code.threads == CASES[case].least * BLOCKS[code.kernel]


@each_gpu
@each_case
def test_blocks_enough_fit_to_keep_memory_busy(case: int, capability: int) -> None:
    """Fewer than fill a multiprocessor do, where each thread waits for several vectors at a time."""
    for code in codes(case, capability):
        loads = sum(bits // 8 * number for bits, number in code.widths("LDG").items() if bits >= VECTOR)
        full = code.blocks() * code.threads == 2048
        assert code.kernel in ADDERS or full or code.blocks() * code.threads * loads >= ON_THEIR_WAY


def test_every_kernel_of_the_project_is_compiled_here() -> None:
    """A kernel that another one calls is part of it."""
    launched = set()
    for path in sorted((ROOT / "apertus_model").rglob("*_triton.py")):
        tree = ast.parse(path.read_text())
        launched |= {
            node.func.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        }
    assert launched == {code.kernel for case in range(len(CASES)) for code in codes(case, 90)}
    others = [
        path
        for path in (ROOT / "apertus_model").rglob("*.py")
        if "@triton.jit" in path.read_text() and not path.name.endswith("_triton.py")
    ]
    assert others == []
