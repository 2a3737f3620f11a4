"""Where the time of a step goes, by class: from the trace of torch.profiler, and from a rehearsal.

Invariant: the classes of a trace sum to the step. At each moment, the kernel that began last counts; where
none runs, the GPU waits for the host. On a CPU, operators take the place of kernels.
"""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from apertus_model.rehearsal.records import Rehearsed

STEPS = "measured steps"  # name of the region of the trace
GAPS, OTHER = "gaps", "other"
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what runs on a GPU
CALLS = ("cpu_op", "user_annotation")
# The class of a kernel, or of an operator, by what is searched for in its name, and in the name of the
# operator that launched it, or that it is within; in this order.
NEAR = {
    "attention": r"attention|flash|fmha|flex|varlen|sdpa",
    "products": r"gemm|cutlass|nvjet|xmma|cublas|_scaled_mm|^(aten::)?(mm|addmm_?|bmm|linear|matmul)$",
}
# The same, searched for in the names of all operators around it, too.
AROUND = {
    "optimizer": r"Optimizer|[Aa]dam|_foreach_(norm|mul|div|lerp|addc|sqrt|add|pow)|vector_norm|clip",
    "embedding and loss": r"mbedding|[Cc]ross_?[Ee]ntropy|[Ss]oftmax|nll_loss",
    "norms": r"rms_?norm|RmsNorm|layer_norm|rsqrt",
    "activation": r"xielu|XIELU|[Ss]ilu|expm1|[Ss]oftplus",
}
LAST = {"casts and copies": r"[Cc]opy|Mem(cpy|set)|[Cc]ast|[Ff]ill|zero|split_with|(aten::|^)_?(to|cat)$"}
CLASSES = (*NEAR, *AROUND, *LAST, OTHER, GAPS)


@functools.cache
def class_of(*names: str) -> str:
    """The class of a kernel or an operator, the last of `names`, within the operators before it."""
    for table, near in ((NEAR, 2), (AROUND, len(names)), (LAST, 2)):
        for kind, pattern in table.items():
            if any(re.search(pattern, name) for name in names[-near:]):
                return kind
    return OTHER


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
    """Predicted seconds a step by the same classes. Operators that a report leaves out, and those that a
    compiler fuses, are `other`; what no computation hides is a gap."""
    total = dict.fromkeys(CLASSES, 0.0)
    for operator in rehearsed.operators:
        kind = {"matrix": "products", "attention": "attention"}.get(operator.kind)
        total[kind or class_of(operator.operator)] += operator.seconds
    total[OTHER] += rehearsed.compute_seconds - sum(total.values())
    total[GAPS] = rehearsed.waited_seconds
    return total
