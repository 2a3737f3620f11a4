"""Where the time of a step goes, by class: from the trace of torch.profiler, and from a rehearsal.

Invariant: the classes of a trace sum to the step. At each moment, the kernel that began last counts; where
none runs, the GPU waits for the host. On a CPU, operators take the place of kernels.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from apertus_model.rehearsal.classes import CLASSES, GAPS, class_of
from apertus_model.rehearsal.records import Rehearsed

STEPS = "measured steps"  # name of the region of the trace
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what runs on a GPU
CALLS = ("cpu_op", "user_annotation")


def seconds_by_class(trace: str | Path, steps: int) -> dict[str, float]:
    """Seconds a step by class, of a trace in Chrome's format that has the region `STEPS`."""
    events = [event for event in json.loads(Path(trace).read_text())["traceEvents"] if "dur" in event]
    region = next(event for event in events if event["name"] == STEPS and event["cat"] == "user_annotation")
    begin, end = _times(region)
    spans = sorted(_spans(events), key=lambda span: (span[0], -span[1]))  # inner ones after outer ones
    times = [time for span in spans for time in span[:2]]
    edges = np.unique(np.clip([begin, *times, end], begin, end))
    owners = np.full(len(edges) - 1, CLASSES.index(GAPS))  # of the time between two edges
    for first, last, kind in spans:
        owners[np.searchsorted(edges, first) : np.searchsorted(edges, last)] = CLASSES.index(kind)
    seconds = np.bincount(owners, np.diff(edges), len(CLASSES)) / 1e6 / steps
    return dict(zip(CLASSES, seconds.tolist(), strict=True))


def _times(event: dict[str, Any]) -> tuple[float, float]:
    """Begin and end, in microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def _spans(events: list[dict[str, Any]]) -> Iterator[tuple[float, float, str]]:
    """(begin, end, class) of each kernel, or of each operator where there are no kernels."""
    kernels = [event for event in events if event.get("cat") in KERNELS]
    calls = [event for event in events if event.get("cat") in CALLS and event["name"] != STEPS]
    launched = {}  # names of operators, the innermost last, by the id that their kernels have
    open_calls = defaultdict[Any, list[dict[str, Any]]](list)  # by thread
    for call in sorted(calls, key=lambda call: (call["ts"], -call["dur"])):
        around = [outer for outer in open_calls[call["tid"]] if _times(outer)[1] > call["ts"]]
        open_calls[call["tid"]] = [*around, call]
        names = [outer["name"] for outer in open_calls[call["tid"]]]
        launched[call.get("args", {}).get("External id")] = names
        if not kernels:
            yield *_times(call), class_of(*names)
    for kernel in kernels:
        names = launched.get(kernel["args"].get("External id", -1), [])
        yield *_times(kernel), class_of(*names, kernel["name"])


def predicted(rehearsed: Rehearsed) -> dict[str, float]:
    """Predicted seconds a step by the same classes. What no computation hides is a gap."""
    return dict.fromkeys(CLASSES, 0.0) | rehearsed.classes | {GAPS: rehearsed.waited_seconds}
