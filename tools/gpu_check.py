"""Writes the table of `make gpu-check`: `python -m tools.gpu_check RESULT.xml docs/gpu_check.md`.

RESULT.xml is in JUnit's format, as `pytest --junitxml` writes it. The measurements of a check are properties
of its test case.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import NamedTuple
from xml.etree import ElementTree

from infra.store.writing.attempt import installed_versions
from specs.cluster import known_gpu
from tools.record import outcome_of, stamp, table

PACKAGES = (
    "torch", "nvidia-cuda-runtime", "nvidia-cublas", "nvidia-cudnn-cu13", "triton", "torchtitan", "torchao",
    "transformers", "flash-attn", "flash-attn-3", "vllm",
)  # fmt: skip
RESULTS = {"passed": "passed", "failed": "**failed**", "skipped": "not applicable"}


class Device(NamedTuple):
    """The GPU of a machine, as CUDA names it."""

    name: str
    memory: int  # bytes
    capability: tuple[int, int]

    @property
    def sheet(self) -> str | None:
        """Its name in `specs.cluster.GPUS`; None if no data sheet is known."""
        return known_gpu(self.name, self.memory)


def first_gpu() -> Device | None:
    """The first GPU; None without one. Uses CUDA, so that this process cannot be forked any more."""
    import torch

    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(0)
    return Device(gpu.name, gpu.total_memory, (gpu.major, gpu.minor))


def nvidia_smi(*fields: str) -> dict[str, str]:
    """What NVIDIA's driver says of the first GPU, by field; nothing without its program."""
    if which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    values = next(iter(answer.stdout.splitlines()), "").split(", ") if answer.returncode == 0 else ()
    return dict(zip(fields, values, strict=False))


def machine() -> dict[str, str]:
    """What the machine is, for a record: its first GPU, and the versions of what computes."""
    gpu = nvidia_smi("name", "memory.total", "compute_cap", "driver_version", "power.limit", "clocks.max.sm")
    return (gpu or {"GPU": "none"}) | installed_versions(PACKAGES)


def name_of(case: ElementTree.Element) -> str:
    """The name of a test in words: `test_a_step_takes_long[H100]` is `a step takes long: H100`."""
    test, _, variant = case.attrib["name"].partition("[")
    words = test.removeprefix("test_").replace("_", " ")
    return f"{words}: {variant.removesuffix(']')}" if variant else words


def found_by(case: ElementTree.Element) -> str:
    """The measurements of a check, and why it failed or does not apply."""
    lines = [f"{fact.attrib['name']}: {fact.attrib['value']}" for fact in case.iter("property")]
    for answer in (*case.findall("failure"), *case.findall("error"), *case.findall("skipped")):
        lines.append(answer.attrib.get("message", "").strip().partition("\n")[0])
    return "; ".join(lines)


def report(file: str) -> str:
    """The report in Markdown: a line per check, and below them the whole messages of failed checks."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    outcomes = [outcome_of(case) for case in cases]
    counts = ", ".join(f"{outcomes.count(kind)} {RESULTS[kind].strip('*')}" for kind in RESULTS)
    rows = [
        (name_of(case), RESULTS[outcome], f"{float(case.attrib['time']):.0f}", found_by(case))
        for case, outcome in zip(cases, outcomes, strict=True)
    ]
    lines = [
        "# GPU check",
        "",
        f"{stamp()}. **{counts}.** Written by `make gpu-check`.",
        "",
        *table(("check", "result", "seconds", "found"), rows),
    ]
    for case, outcome in zip(cases, outcomes, strict=True):
        if outcome == "failed":
            texts = [answer.text or "" for answer in (*case.findall("failure"), *case.findall("error"))]
            lines += ["", f"## {name_of(case)}", "", "```", *texts, "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = report(sys.argv[1])
    Path(sys.argv[2]).write_text(text)
    sys.stdout.write(text)
