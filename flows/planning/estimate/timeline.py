"""Computes when each part that trains, samples or scores would run if everything else took no time.

Parts begin in the order of the plan, each as soon as its inputs are ready, fewer than `concurrency` others
are running, and the nodes that it needs are free; while one waits, later ones may start. A run submits them
in the same way (`flows.execution.flow`), except that the cluster makes them wait for nodes.

Invariant: a pure function of graph and durations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flows.planning.graph import Graph


class Span(NamedTuple):
    """The begin and end times of a part, in seconds from the start of the run."""

    begin: float
    end: float


def spans(
    graph: Graph, seconds: Mapping[str, float], nodes: Mapping[str, int], concurrency: int, available: int
) -> dict[str, Span]:
    """The span of every part in `seconds`, with the `nodes` that it needs out of `available`."""
    duplicates = graph.duplicates()
    needs = {name: _needs(graph, name, duplicates) for name in graph.nodes}
    waiting, finished, found = list(graph.nodes), set[str](), dict[str, Span]()
    running: dict[str, int] = {}
    now = 0.0
    while waiting:
        begun = []
        for name in waiting:  # inputs first
            asked = min(nodes.get(name, 0), available)
            if not needs[name] <= finished:
                continue
            if name not in seconds:
                finished.add(name)
            elif len(running) < concurrency and asked <= available - sum(running.values()):
                running[name], found[name] = asked, Span(now, now + seconds[name])
            else:
                continue
            begun.append(name)
        waiting = [name for name in waiting if name not in set(begun)]
        if begun and not running:
            continue  # `after:` may name a later stage of the plan
        if not running:
            break
        over = min(running, key=lambda name: found[name].end)
        now = found[over].end
        del running[over]
        finished.add(over)
    return found


def _needs(graph: Graph, name: str, duplicates: Mapping[str, str]) -> set[str]:
    """Parts that must finish before a part begins; for a duplicate, the part that does its work."""
    node = graph.nodes[name]
    before = {end for stage in graph.after.get(node.stage, ()) for end in graph.ends_of(stage)}
    return {duplicates[name]} if name in duplicates else {*graph.parents(node), *before}
