"""Which parts are the end of a stage, and when inputs are equal."""

from __future__ import annotations

from collections.abc import Callable

from flows.planning.graph import Input
from flows.planning.plan import Plan
from specs.differences import changes

Planned = Callable[..., Plan]


def test_ends_of_a_stage_are_the_last_part_of_a_chain_or_all_parallel_parts(planned: Planned) -> None:
    graph = planned(
        "stages.corpus.sources.copy={}",
        'sources.copy={url: "installed:stdlib", format: code, include: ["json/*.py"]}',
    ).graph
    assert graph.ends_of("pretrain") == ["pretrain/3"]
    assert graph.ends_of("corpus") == ["corpus/notes", "corpus/copy"]
    assert graph.ends_of("nothing") == []


def test_inputs_are_equal_by_fingerprint_and_step_whatever_their_names() -> None:
    parent = Input("pretrain", "f", "pretrain", step=3)
    assert changes({"parent": parent}, {"parent": Input("pretrain", "f", "base", step=3)}) == []
    (change,) = changes({"parent": parent}, {"parent": Input("pretrain", "f", "pretrain", step=4)})
    assert (change.name, change.a and change.a.step, change.b and change.b.step) == ("parent", 3, 4)
