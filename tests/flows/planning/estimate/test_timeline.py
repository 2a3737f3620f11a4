"""Which parts run side by side."""

from __future__ import annotations

import pytest

from flows.planning.estimate.time_and_cost import spans
from flows.planning.graph import Graph, Input, Node
from specs.launch import Launch
from tests.flows.planning.segments import segment
from tools.published import plan_of


def test_parts_run_side_by_side_as_far_as_inputs_nodes_and_concurrency_allow() -> None:
    graph = Graph()
    for name, parents in {
        "data": (),
        "a": ("data",),
        "b": ("data",),
        "c": ("data",),
        "ab": ("a", "b"),
    }.items():
        read = {parent: Input("pretrain", parent, parent, parent, 1) for parent in parents}
        graph.nodes[name] = Node(name, name, "pretrain", 1, segment(seed=len(graph.nodes)), read, Launch())
    seconds = {"a": 3.0, "b": 5.0, "c": 1.0, "ab": 2.0}
    nodes = {"a": 2, "b": 2, "c": 1, "ab": 4}

    def ends(concurrency: int, available: int) -> dict[str, float]:
        return {name: span.end for name, span in spans(graph, seconds, nodes, concurrency, available).items()}

    assert ends(1, 9) == {"a": 3, "b": 8, "c": 9, "ab": 11}
    assert ends(9, 9) == {"a": 3, "b": 5, "c": 1, "ab": 7}
    assert ends(2, 9) == {"a": 3, "b": 5, "c": 4, "ab": 7}
    # `c` fits beside `a`; `ab` asks for more than there is, and gets all
    assert ends(9, 3) == {"a": 3, "c": 1, "b": 8, "ab": 10}
    graph.after["c"] = ("ab",)
    assert ends(9, 9) == {"a": 3, "b": 5, "ab": 7, "c": 8}


def test_wall_clock_of_variants_depends_on_the_nodes() -> None:
    """Four stages of eight nodes at a time on 32: no faster than all GPUs always busy, and no slower than
    half of them."""
    plan = plan_of("wso")
    totals = plan.estimates.totals()
    busy = totals["gpu_hours"] * 3600 / 256
    assert busy < totals["seconds"] < 2 * busy
    published = plan_of("apertus-8b").estimates
    every = [*published.parts, *published.asking]
    assert published.seconds == pytest.approx(sum(part.spent.seconds or 0 for part in every))
