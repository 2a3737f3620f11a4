"""Records the result of `make test-all`: `python -m tools.record RESULT.xml... > docs/test_all.md`.

The files are in JUnit's format, as `pytest --junitxml` writes them. If a test is in several files, the last
one counts.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from shutil import which
from xml.etree import ElementTree

OUTCOMES = ("passed", "skipped", "failed")
SHOWN = 3


def outcome_of(case: ElementTree.Element) -> str:
    """The outcome of one test case; an error in a fixture is a failure."""
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def commit() -> str:
    """The short hash of the checkout; `unknown` without git."""
    if which("git") is None:
        return "unknown"
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def stamp() -> str:
    """The date and the commit."""
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown; a `|` in a cell is escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return [f"| {' | '.join(line)} |" for line in escaped]


def folder_of(module: str) -> str:
    """The folder of a test module: `tests`, or the folder directly in it that contains the module."""
    parts = module.split(".")
    return parts[0] if parts[1].startswith("test_") else "/".join(parts[:2])


def report(files: list[str]) -> str:
    """The report in Markdown: totals by folder, skipped tests with the reasons, and the longest tests."""
    cases, wall = {}, 0.0
    for file in files:
        for suite in ElementTree.parse(file).iter("testsuite"):
            wall += float(suite.attrib["time"])
            for case in suite.iter("testcase"):
                cases[case.attrib["classname"], case.attrib["name"]] = case
    rows: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys((*OUTCOMES, "seconds"), 0))
    reasons: dict[str, int] = defaultdict(int)
    for (module, _), case in cases.items():
        row = rows[folder_of(module)]
        row[outcome_of(case)] += 1
        row["seconds"] += float(case.attrib["time"])
        for skip in case.findall("skipped"):
            reasons[skip.attrib.get("message", "").splitlines()[0].partition(":")[0]] += 1
    totals = {name: sum(row[name] for row in rows.values()) for name in (*OUTCOMES, "seconds")}
    longest = sorted(cases.items(), key=lambda item: -float(item[1].attrib["time"]))[:SHOWN]
    lines = [
        "# The last run of all tests",
        "",
        (
            f"{stamp()}, Python {platform.python_version()}, torch"
            f" {metadata.version('torch')}, {os.cpu_count()} CPU cores. Written by `make test-all`."
        ),
        "",
        "**"
        + ", ".join(f"{int(totals[name]):,} {name}" for name in OUTCOMES)
        + f"**, {totals['seconds'] / 60:.0f} minutes of tests in {wall / 60:.0f} minutes.",
        "",
        *table(
            ("tests", *OUTCOMES, "seconds"),
            ((folder, *(f"{number:.0f}" for number in row.values())) for folder, row in sorted(rows.items())),
        ),
        "",
        "Failed: "
        + (
            ", ".join(f"`{name}`" for (_, name), case in cases.items() if outcome_of(case) == "failed")
            or "none"
        )
        + ".",
        "",
        "Skipped, and why:",
        "",
        *(f"- {number} x {reason}" for reason, number in sorted(reasons.items())),
        "",
        f"The {SHOWN} longest:",
        "",
        *(f"- {float(case.attrib['time']):.0f} s `{name}`" for (_, name), case in longest),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(report(sys.argv[1:]))
