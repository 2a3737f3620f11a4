"""Timing several ways to the same thing side by side, on a machine that others use too.

Invariant: the contenders take turns, a round each, so that what slows the machine slows all; medians over the
rounds are printed with the smallest and the largest, and ratios are taken round by round. Processor time is
that of all threads of the process.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Contender:
    """`run()` handles some tokens and returns their number; how many per second of processor and of wall
    time, by round."""

    name: str
    run: Callable[[], int]
    per_cpu_second: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)


def race(contenders: list[Contender], rounds: int) -> None:
    """One round that does not count, then `rounds` ones."""
    for number in range(rounds + 1):
        for contender in contenders:
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = contender.run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number:
                contender.per_cpu_second.append(tokens / max(cpu, 1e-9))
                contender.per_second.append(tokens / wall)


def table(contenders: list[Contender], base: Contender | None) -> str:
    """A line per contender: million tokens per second of one core, per second of wall time, and the ratio
    to `base` in core time."""
    lines = [
        f"{'':58} {'M tokens/s per core':>24} {'M tokens/s, wall':>24}"
        + (f"  against {base.name}" if base else "")
    ]
    for contender in contenders:
        line = (
            f"{contender.name:58} {spread(contender.per_cpu_second, 1e-6):>24}"
            f" {spread(contender.per_second, 1e-6):>24}"
        )
        if base:
            pairs = zip(contender.per_cpu_second, base.per_cpu_second, strict=True)
            line += f"  x {spread([mine / other for mine, other in pairs])}"
        lines.append(line)
    return "\n".join(lines)


def spread(values: list[float], scale: float = 1.0) -> str:
    """`median (smallest to largest)`."""
    found = (value * scale for value in (min(values), statistics.median(values), max(values)))
    low, middle, high = (f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}" for value in found)
    return f"{middle} ({low} to {high})"


def memory() -> dict[str, float]:
    """MiB of this process: `anonymous` is its own, `file` is mapped files, `peak` the most of both so far."""
    names = {"RssAnon": "anonymous", "RssFile": "file", "VmHWM": "peak"}
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(status[key].split()[0]) / 1024 for key, name in names.items()}
