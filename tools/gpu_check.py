"""Writes the table of `make gpu-check`: `python -m tools.gpu_check RESULT.xml docs/gpu_check.md`.

RESULT.xml is in JUnit's format, as `pytest --junitxml` writes it. The measurements of a check are properties
of its test case.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from shutil import which
from xml.etree import ElementTree

from tools.record import commit, outcome_of

PACKAGES = ("torch", "triton", "torchtitan", "torchao", "transformers", "flash-attn", "vllm")
RESULTS = {"passed": "passed", "failed": "**failed**", "skipped": "not applicable"}


def versions() -> dict[str, str]:
    """The installed ones of `PACKAGES`."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def nvidia_smi(*fields: str) -> dict[str, str]:
    """What NVIDIA's driver says of the first GPU, by field; nothing without its program."""
    if which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    values = next(iter(answer.stdout.splitlines()), "").split(", ") if answer.returncode == 0 else ()
    return dict(zip(fields, values, strict=False))


def name_of(case: ElementTree.Element) -> str:
    """The name of a test in words: `test_a_step_takes_long[H100]` is `a step takes long: H100`."""
    test, _, variant = case.attrib["name"].partition("[")
    words = test.removeprefix("test_").replace("_", " ")
    return f"{words}: {variant.removesuffix(']')}" if variant else words


def found_by(case: ElementTree.Element) -> str:
    """The measurements of a check, and why it failed or does not apply."""
    lines = [f"{fact.attrib['name']}: {fact.attrib['value']}" for fact in case.iter("property")]
    for answer in (*case.findall("failure"), *case.findall("error"), *case.findall("skipped")):
        lines.append(answer.attrib.get("message", "").strip().splitlines()[0])
    return "; ".join(lines).replace("|", "\\|")


def report(file: str) -> str:
    """The report in Markdown: a line per check, and below them the whole messages of failed checks."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    outcomes = [outcome_of(case) for case in cases]
    counts = ", ".join(f"{outcomes.count(kind)} {RESULTS[kind].strip('*')}" for kind in RESULTS)
    lines = [
        "# GPU check",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}. **{counts}.** Written by `make gpu-check`.",
        "",
        "| check | result | seconds | found |",
        "|---|---|---|---|",
    ]
    for case, outcome in zip(cases, outcomes, strict=True):
        seconds = float(case.attrib["time"])
        lines.append(f"| {name_of(case)} | {RESULTS[outcome]} | {seconds:.0f} | {found_by(case)} |")
    for case, outcome in zip(cases, outcomes, strict=True):
        if outcome == "failed":
            texts = [answer.text or "" for answer in (*case.findall("failure"), *case.findall("error"))]
            lines += ["", f"## {name_of(case)}", "", "```", *texts, "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    table = report(sys.argv[1])
    Path(sys.argv[2]).write_text(table)
    sys.stdout.write(table)
