from __future__ import annotations

import platform
import re
import shutil
from functools import cache
from pathlib import Path

import pytest

from apertus_model.evaluation import sandbox_filter
from apertus_model.evaluation.sandbox import INSTALL, Outcome, Sandbox
from apertus_model.evaluation.sandbox_filter import ARCHITECTURES, MMAP, REFUSED, syscall_filter

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ALLOWED, NOT_PERMITTED, KILLED = 0x7FFF0000, 0x00050001, 0x80000000


@cache
def kernel_numbers(machine: str) -> dict[str, int]:
    """Numbers of system calls by their names, from a header of the kernel, perhaps older than some calls."""
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"no {header}: apt-get install linux-libc-dev")
    found = re.findall(r"^#define __NR3?_?(?:264_)?(\w+)\s+(\d+)", header.read_text(), re.M)
    return {name.removeprefix("3264_"): int(number) for name, number in found}


def _verdict(program: bytes, architecture: int, number: int, flags: int = 0) -> int:
    """What a filter returns for a call: an interpreter of the instructions that it has."""
    instructions = [
        (int.from_bytes(program[i : i + 2], "little"), *program[i + 2 : i + 4],
         int.from_bytes(program[i + 4 : i + 8], "little"))
        for i in range(0, len(program), 8)
    ]  # fmt: skip
    at = loaded = 0
    while True:
        code, yes, no, constant = instructions[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            loaded = {0: number, 4: architecture, 16 + 3 * 8: flags}[constant]
        elif code == 0x54:
            loaded &= constant
        else:
            at += yes if (loaded == constant if code == 0x15 else loaded >= constant) else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_docstring_names_the_calls_that_the_filter_refuses_and_no_others(machine: str) -> None:
    """By the kernel's names."""
    program, names = (
        syscall_filter(machine),
        {number: name for name, number in kernel_numbers(machine).items()},
    )
    refused = {
        names[number]
        for number in range(600)
        if number in names and _verdict(program, ARCHITECTURES[machine], number) == NOT_PERMITTED
    }
    lines = [line for line in f"{sandbox_filter.__doc__}".splitlines() if line.startswith("- ")]
    named = {name for line in lines for name in re.split(r", ", line.partition(": ")[2]) if name}
    assert refused == named & set(names.values())
    assert "mmap of shared memory without a file" in f"{sandbox_filter.__doc__}"


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_refused_calls_have_the_numbers_of_the_kernel(machine: str) -> None:
    numbers, column = kernel_numbers(machine), list(ARCHITECTURES).index(machine)
    stated = {name: pair[column] for calls in REFUSED.values() for name, pair in calls.items()}
    stated["mmap"] = MMAP[column]
    newer = {name for name, number in stated.items() if (number or 0) > max(numbers.values())}
    assert {name: stated[name] for name in stated.keys() - newer} == {
        name: numbers.get(name) for name in stated.keys() - newer
    }


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_refuses_the_refused_calls_and_no_others(machine: str) -> None:
    program, architecture = syscall_filter(machine), ARCHITECTURES[machine]
    column = list(ARCHITECTURES).index(machine)
    refused = {pair[column] for calls in REFUSED.values() for pair in calls.values()}
    for number in range(600):
        expected = NOT_PERMITTED if number in refused else ALLOWED
        assert _verdict(program, architecture, number) == expected
        assert _verdict(program, architecture, number, flags=0x22) == expected  # private, without a file
        shared = NOT_PERMITTED if number == MMAP[column] else expected
        assert _verdict(program, architecture, number, flags=0x4021) == shared
    assert _verdict(program, architecture, 0x40000000) == NOT_PERMITTED
    assert _verdict(program, 0x40000003, 1) == KILLED  # 32-bit calls


@pytest.fixture(scope="module")
def box() -> Sandbox:
    if shutil.which("bwrap") is None:
        pytest.skip(f"bubblewrap is not installed: {INSTALL}")
    return Sandbox()


@pytest.mark.parametrize("reason", REFUSED)
def test_a_program_makes_none_of_the_calls_of_a_line(box: Sandbox, reason: str) -> None:
    column = list(ARCHITECTURES).index(platform.machine())
    numbers = {name: pair[column] for name, pair in REFUSED[reason].items() if pair[column] is not None}
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers}.items():
    assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1, name
"""
    assert box.run(program) == Outcome(outcome="passed")


def test_memory_is_private_or_has_a_file(box: Sandbox) -> None:
    program = """
import mmap
with open("file", "wb+") as file:
    file.truncate(1 << 20)
    mmap.mmap(file.fileno(), 1 << 20)
mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
try:
    mmap.mmap(-1, 1 << 20)
except PermissionError:
    pass
else:
    raise AssertionError
"""
    assert box.run(program) == Outcome(outcome="passed")
