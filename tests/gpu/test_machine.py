"""What the machine is, and whether its GPU does what its data sheet says."""

import platform
import re
from pathlib import Path

import pytest
import torch

from apertus_model.rehearsal.rates import MEMORY, SHEETS
from infra.store.writing.attempt import installed_versions
from specs.cluster import GPUS
from tests.gpu.conftest import (
    Measured,
    device,
    in_one_process,
    needs_gpus,
    number_of_gpus,
    seconds_of,
    sheet_of_this_gpu,
)
from tools.gpu_check import PACKAGES, nvidia_smi

ROOT = Path(__file__).resolve().parents[2]
HALF = 0.5  # of the sheet: below, something is wrong with the machine


def test_installed_versions_are_the_pinned_ones(measured: Measured) -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    measured("processor", platform.machine())
    different = []
    for name, installed in installed_versions(PACKAGES).items():
        measured(name, installed)
        if name in pins and installed.split("+")[0] != pins[name]:
            different.append(f"{name} is {installed}, constraints.txt has {pins[name]}")
    assert not different


@needs_gpus()
def test_the_gpu_is_known(measured: Measured) -> None:
    measured("GPUs", f"{number_of_gpus()} x {device().name}")
    measured("memory", f"{device().memory / 1e9:.1f} GB")
    measured("compute capability", ".".join(map(str, device().capability)))
    measured("CUDA of torch", torch.version.cuda or torch.version.hip)
    measured("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    if facts := nvidia_smi("driver_version", "power.limit"):
        measured("driver and power limit", ", ".join(facts.values()))
    if device().sheet is None:
        pytest.skip(f"no data sheet of {device().name} is known, so nothing is predicted for it")
    assert device().capability == SHEETS[sheet_of_this_gpu()].capability


@needs_gpus()
def test_memory_is_copied_at_the_rate_of_the_data_sheet(tmp_path: Path, measured: Measured) -> None:
    name = sheet_of_this_gpu()

    def copied() -> float:
        source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))

    rate = in_one_process(tmp_path, copied)
    share = rate / SHEETS[name].bandwidth
    measured("read and written", f"{rate / 1e12:.2f} TB/s, {share:.0%} of the sheet of {name}")
    measured("a rehearsal expects", f"{MEMORY:.0%}")
    assert HALF < share < 1.05


@needs_gpus()
@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (4096, 4096, 21504), (4096, 21504, 4096)])
def test_matrices_are_multiplied_at_the_rate_of_the_data_sheet(
    shape: tuple[int, int, int], tmp_path: Path, measured: Measured
) -> None:
    name, (rows, inner, columns) = sheet_of_this_gpu(), shape

    def multiplied() -> float:
        a = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
        b = torch.randn(inner, columns, dtype=torch.bfloat16, device="cuda")
        return 2 * rows * inner * columns / seconds_of(lambda: a @ b)

    rate = in_one_process(tmp_path, multiplied)
    share = rate / GPUS[name].bf16_flops
    measured("bfloat16", f"{rate / 1e12:.0f} TFLOP/s, {share:.0%} of the sheet of {name}")
    measured("a rehearsal expects", f"{SHEETS[name].matrix:.0%}")
    assert HALF < share < 1.05
