"""Where the time of a step goes, by class: from the trace of torch.profiler, and from a rehearsal.

Invariant: the classes of a trace sum to the step. At each moment, the kernel that began last counts; where
none runs, the GPU waits for the host. On a CPU, operators take the place of kernels.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class Span(NamedTuple):
    """A kernel, or an operator."""

    begin: float  # microseconds
    end: float
    kind: str  # of `CLASSES`


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
    begin, end = region["ts"], region["ts"] + region["dur"]
    spans = [span for span in _spans(events) if span.begin < end and span.end > begin]
    clipped = [Span(max(span.begin, begin), min(span.end, end), span.kind) for span in spans]
    return {kind: time / 1e6 / steps for kind, time in _shared(clipped, begin, end).items()}


def _spans(events: list[dict[str, Any]]) -> Iterator[Span]:
    calls = [event for event in events if event.get("cat") in CALLS and event["name"] != STEPS]
    around = dict(_nested(calls))
    kernels = [event for event in events if event.get("cat") in KERNELS]
    launched = {calls[place]["args"].get("External id"): place for place in around if "args" in calls[place]}
    for kernel in kernels:
        place = launched.get(kernel["args"].get("External id"))
        names = () if place is None else (*around[place], calls[place]["name"])
        yield Span(kernel["ts"], kernel["ts"] + kernel["dur"], class_of(*names, kernel["name"]))
    for place, names in around.items() if not kernels else ():
        call = calls[place]
        yield Span(call["ts"], call["ts"] + call["dur"], class_of(*names, call["name"]))


def _nested(calls: list[dict[str, Any]]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(index of a call, names of the calls around it on its thread)."""
    threads = defaultdict[Any, list[tuple[float, str]]](list)  # (end, name) of the calls that are open
    for place in sorted(range(len(calls)), key=lambda place: (calls[place]["ts"], -calls[place]["dur"])):
        call = calls[place]
        stack = threads[call["tid"]]
        while stack and stack[-1][0] <= call["ts"]:
            stack.pop()
        yield place, tuple(name for _, name in stack)
        stack.append((call["ts"] + call["dur"], call["name"]))


def _shared(spans: list[Span], begin: float, end: float) -> dict[str, float]:
    """The time from `begin` to `end` by class: each moment belongs to the span that began last."""
    total = dict.fromkeys(CLASSES, 0.0)
    waiting, open_ = sorted(spans, reverse=True), list[tuple[float, float, str]]()
    now = begin
    while now < end:
        while waiting and waiting[-1].begin <= now:
            span = waiting.pop()
            heapq.heappush(open_, (-span.begin, span.end, span.kind))
        while open_ and open_[0][1] <= now:
            heapq.heappop(open_)
        until = min(end, waiting[-1].begin if waiting else end, open_[0][1] if open_ else end)
        total[open_[0][2] if open_ else GAPS] += until - now
        now = until
    return total


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
