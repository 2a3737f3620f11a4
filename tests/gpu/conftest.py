"""The checks of `make gpu-check`: what no machine without GPUs can show.

Each check computes in processes of its own, so that a fault on the GPU spoils no other. pytest's own process
never uses CUDA. A check that cannot run on a machine is skipped with the reason: it is not applicable there.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pytest
import torch

from apertus_model.rehearsal.rates import SHEETS
from tests.apertus_model.ranks import in_processes
from tools.gpu_check import Device, first_gpu


class NotApplicable(Exception):
    """Raised in a check's process where the machine cannot run it."""


class Measured(Protocol):
    """Writes a number or a fact into the table of the check."""

    def __call__(self, what: str, value: object) -> None: ...


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    return record_property


def number_of_gpus() -> int:
    """GPUs that this process may use. Asks NVML, so that processes forked from this one can use CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def needs_gpus(number: int = 1) -> pytest.MarkDecorator:
    reason = f"needs {number} GPU{'s' * (number > 1)}, this machine has {number_of_gpus() or 'none'}"
    return pytest.mark.skipif(number_of_gpus() < number, reason=reason)


@functools.cache
def device() -> Device:
    """The first GPU, asked in a process of its own."""
    found = in_one_process(Path(os.environ.get("TMPDIR", "/tmp")) / f"gpu-{os.getpid()}", first_gpu)
    return Device(*found)


def sheet_of_this_gpu() -> str:
    if (name := device().sheet) is None:
        pytest.skip(f"no data sheet of {device().name} is known; known: {', '.join(SHEETS)}")
    return name


def in_one_process(folder: Path, work: Callable[[], Any]) -> Any:
    """The result of `work()` in a process of its own; a check that is not applicable there is skipped."""

    def child(rank: int) -> tuple[Any, str | None]:
        try:
            return work(), None
        except NotApplicable as error:
            return None, str(error)

    ((result, reason),) = in_processes(folder, child, 1)
    if reason is not None:
        pytest.skip(reason)
    return result


def import_engine() -> None:
    """torchao asks for the GPU's capability when it is imported. That would initialise CUDA in this process,
    after which no process that it forks could use CUDA, so a process of its own asks."""
    capability = device().capability
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch("torch.utils._triton.has_triton", return_value=True),
    ):
        import apertus_model.trainer.config  # noqa: F401


if number_of_gpus():
    import_engine()


def seconds_of(work: Callable[[], object], repetitions: int = 20, queued: int = 1) -> float:
    """Median seconds of `work` on the GPU, after three calls that do not count. Where it is shorter than its
    launch, `queued` calls are launched at a time, as in a training step."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(queued):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / queued)
    return sorted(times)[len(times) // 2]
