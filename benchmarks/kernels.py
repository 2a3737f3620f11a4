"""The project's Triton kernels, what they move and how they are compiled: `python -m benchmarks.kernels`.

Bytes are counted, per element: those of the kernel by Triton's interpreter, those of its peer, the same by
torch's operators one by one (eager), by a dispatch mode, and those of torch.compile's kernels, by themselves.
The least is each input read once and each result written once.
Registers and widths of loads are those of the machine code for an H100, made without one. On a GPU, also the
rate that was reached, beside that of torch's copy.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import apertus_model.device  # before anything of torchtitan  # noqa: F401
from apertus_model.losses import softmax, softmax_triton
from apertus_model.model import rotation_triton, xielu_triton
from apertus_model.model.rotation import CosSinRoPE
from apertus_model.model.xielu import BETA, formula, formula_backward
from apertus_model.optimizers import ademamix_triton
from apertus_model.optimizers.ademamix import AdEMAMix
from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.costs import read_and_written, size_of
from benchmarks.kernel_code import compiled

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
NAMES = {FLOAT32: "float32", BFLOAT16: "bfloat16"}
HEADS = 8  # of a rank of the 8B with tp 4
WORDS = 1 << 14  # of a row of logits
INTERPRETED, COUNTED, TIMED = 1 << 14, 1 << 17, 1 << 26  # elements
ROUNDS = 20
NO_KERNEL = ("empty", "new_empty", "detach", "_unsafe_view")


@dataclass(frozen=True)
class Case:
    """A kernel with tensors of one kind.

    Args:
        name: with its dtypes.
        least: bytes per element, where everything is read once and written once.
        make: its arguments, for about so many elements, on a device.
        launch: runs it.
        formula: a function that computes the same by torch's operators.
        eager: as it is called without the kernel, where that is not the formula.
    """

    name: str
    least: float
    make: Callable[[int, str], list[Any]]
    launch: Callable[..., Any]
    formula: Callable[..., Any] | None = None
    eager: Callable[..., Callable[[], Any]] | None = None


def _tensors(*dtypes: torch.dtype) -> Callable[[int, str], list[Any]]:
    """Matrices, and xIELU's two scalars in the dtype of the first."""

    def make(elements: int, device: str) -> list[Any]:
        shape = max(elements // 4096, 1), 4096
        return [torch.empty(shape, dtype=dtype, device=device).fill_(0.1) for dtype in dtypes]

    return make


def _with_scalars(number: int, dtype: torch.dtype) -> Callable[[int, str], list[Any]]:
    def make(elements: int, device: str) -> list[Any]:
        scalars = [torch.full((1,), value, dtype=dtype, device=device) for value in (0.3, -0.7)]
        return _tensors(*[dtype] * number)(elements, device) + scalars

    return make


def _heads(dtype: torch.dtype) -> Callable[[int, str], list[Any]]:
    def make(elements: int, device: str) -> list[Any]:
        length = max(elements // HEADS // 128, 1)
        table = torch.ones(1, length, 1, 256, device=device)
        return [torch.ones(1, length, HEADS, 128, dtype=dtype, device=device), table]

    return make


def _logits(dtype: torch.dtype, *of_rows: torch.dtype) -> Callable[[int, str], list[Any]]:
    def make(elements: int, device: str) -> list[Any]:
        rows = max(elements // WORDS, 1)
        logits = torch.full((rows, WORDS), 0.1, dtype=dtype, device=device)
        return [logits, *(torch.ones(rows, dtype=kind, device=device) for kind in of_rows)]

    return make


def _update(cut: bool) -> Callable[..., None]:
    def launch(weight: torch.Tensor, *others: torch.Tensor) -> None:
        ademamix_triton.update(
            weight, *others, lr=1e-4, betas=(0.9, 0.999, 0.9999), alpha=8.0, corrections=(0.1, 0.01),
            eps=1e-8, weight_decay=0.1, rounding=([1, -2, 3], 0, (1 + cut) * weight.shape[1]),
        )  # fmt: skip

    return launch


def _foreach(
    weight: torch.Tensor, gradient: torch.Tensor, moment: torch.Tensor, *_: torch.Tensor
) -> Callable[[], Any]:
    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    optimizer = AdEMAMix([parameter], fused=False, state_dtype=moment.dtype)
    optimizer.step()  # makes the moments
    return optimizer.step


def _xielu(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
    return formula(x, F.softplus(alpha_p), BETA + F.softplus(alpha_n))


def _xielu_backward(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gradient, x, alpha_p, alpha_n = arguments
    return formula_backward(gradient, x, F.softplus(alpha_p), BETA + F.softplus(alpha_n))


def _row_sums(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return softmax.formula(logits.float())


def _to_gradient(logits: torch.Tensor, *of_rows: torch.Tensor) -> torch.Tensor:
    wide = (logits.float() - of_rows[1][:, None]).exp_()
    softmax.gradient_formula(wide, *of_rows)
    return wide.to(logits.dtype)


def _rotation(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    turned: torch.Tensor = CosSinRoPE.apply_rotary_emb(x, x[:, :, :0], table)[0]
    return turned


def _rotation_backward(x: torch.Tensor, table: torch.Tensor) -> Callable[[], Any]:
    """By autograd."""
    turned = _rotation(x.requires_grad_(), table)
    return lambda: torch.autograd.grad(turned, x, turned.detach())


def _cases() -> list[Case]:
    cases = []
    for weights in (FLOAT32, BFLOAT16):
        for moments in (FLOAT32, BFLOAT16):
            for cut in (False, True) if moments == BFLOAT16 else (False,):
                words = f"AdEMAMix, {NAMES[weights]}, moments {NAMES[moments]}" + ", cut rows" * cut
                make = _tensors(weights, weights, *[moments] * 3)
                least = 3 * weights.itemsize + 6 * moments.itemsize
                cases.append(Case(words, least, make, _update(cut), eager=_foreach))
    for dtype in (BFLOAT16, FLOAT32):
        size, name = dtype.itemsize, NAMES[dtype]
        rotated = 2 * size + 4 / HEADS, _heads(dtype)  # half of a table repeats the other half
        cases += [
            Case(f"xIELU, {name}", 2 * size, _with_scalars(1, dtype),
                 functools.partial(xielu_triton.forward, beta=BETA), _xielu),
            Case(f"xIELU backward, {name}", 3 * size, _with_scalars(2, dtype),
                 functools.partial(xielu_triton.backward, beta=BETA), _xielu_backward),
            Case(f"softmax, sums, {name}", size, _logits(dtype), softmax_triton.row_sums, _row_sums),
            Case(f"softmax, gradient, {name}", 2 * size, _logits(dtype, torch.int64, *[FLOAT32] * 3),
                 softmax_triton.to_gradient, _to_gradient),
            Case(f"rotary embedding, {name}", *rotated,
                 lambda x, table: rotation_triton.rotated(x, table, False), _rotation),
            Case(f"rotary embedding backward, {name}", *rotated,
                 lambda x, table: rotation_triton.rotated(x, table, True), _rotation, _rotation_backward),
        ]  # fmt: skip
    return cases


CASES = _cases()


class Moved(TorchDispatchMode):
    """Counts bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and not func.__name__.startswith(NO_KERNEL):
            read, written = read_and_written(func, args, kwargs, result)
            self.bytes += sum(map(size_of, (*read, *written)))
        return result


def eager_bytes(case: Case) -> float:
    """Per element."""
    arguments = case.make(COUNTED, "cpu")
    call = case.eager(*arguments) if case.eager else functools.partial(case.formula, *arguments)
    with Moved() as counter:
        call()
    return counter.bytes / arguments[0].numel()


def in_process(*command: str, **environment: str) -> dict[str, float]:
    """What a module prints as JSON: bytes per element by case."""
    run = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(run.stdout)
    return found


def count() -> None:
    """Prints as JSON what the interpreter's loads and stores move, by name of the case."""
    from triton.runtime.interpreter import InterpreterBuilder

    moved = Counter[str]()

    def counting(original: Any, mask_at: int) -> Any:
        def call(builder: Any, pointers: Any, *rest: Any) -> Any:
            bits = pointers.get_element_ty().primitive_bitwidth
            moved[case.name] += int(rest[mask_at].data.sum()) * bits // 8
            return original(builder, pointers, *rest)

        return call

    for name, mask_at in (("create_masked_load", 0), ("create_masked_store", 1)):
        setattr(InterpreterBuilder, name, counting(getattr(InterpreterBuilder, name), mask_at))
    elements = {}
    for case in CASES:
        arguments = case.make(INTERPRETED, "cpu")
        case.launch(*arguments)
        elements[case.name] = arguments[0].numel()
    print(json.dumps({name: size / elements[name] for name, size in moved.items()}))


def bytes_per_second(call: Callable[[], Any], moved: float) -> float:
    """Median of some rounds on the GPU."""
    seconds = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return moved / statistics.median(seconds)


def main() -> None:
    """Prints the table."""
    gpu = torch.cuda.is_available()
    moved = in_process("benchmarks.kernels", "--count", TRITON_INTERPRET="1")
    fused = in_process("benchmarks.inductor") if fake_cuda.possible() else {}
    copied = 0.0
    if gpu:
        source = torch.ones(TIMED, device="cuda")
        target = torch.empty_like(source)
        copied = bytes_per_second(lambda: target.copy_(source), 2 * source.nbytes)
        print(f"{torch.cuda.get_device_name()}: torch's copy moves {copied / 1e12:.2f} TB/s")
    heads = ("least", "kernel", "eager", "compiled")
    print(f"{'bytes per element':48}" + "".join(f"{head:>9}" for head in heads), end="   ")
    print("registers, spills, loads and stores x bits on an H100")
    for case in CASES:
        with compiled(90) as codes:
            case.launch(*case.make(1 << 20, "meta"))
        widths = [width for operation in ("LDG", "STG") for width in codes[0].widths(operation).items()]
        numbers = case.least, moved[case.name], eager_bytes(case), fused.get(case.name)
        line = f"{case.name:48}" + "".join("        -" if n is None else f"{n:9.1f}" for n in numbers)
        line += f"   {codes[0].registers:3} {codes[0].spills:3}   "
        line += ", ".join(f"{number} x {bits}" for bits, number in widths)
        if gpu:
            arguments = case.make(TIMED, "cuda")
            call = functools.partial(case.launch, *arguments)
            reached = bytes_per_second(call, moved[case.name] * arguments[0].numel())
            line += f"   {reached / 1e12:.2f} TB/s ({reached / copied:.2f} of a copy)"
        print(line)


if __name__ == "__main__":
    count() if "--count" in sys.argv else main()
