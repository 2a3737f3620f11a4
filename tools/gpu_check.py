"""Writes the table of `make gpu-check`: `python -m tools.gpu_check RESULT.xml docs/gpu_check.md`.

RESULT.xml is in JUnit's format, as `pytest --junitxml` writes it. The measurements of a check are properties
of its test case.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from tools.record import commit, outcome_of

RESULTS = {"passed": "passed", "failed": "**failed**", "skipped": "not applicable"}


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
