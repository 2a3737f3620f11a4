"""Which parts are the end of a stage."""

from __future__ import annotations

from collections.abc import Callable

from flows.planning.plan import Plan

Planned = Callable[..., Plan]


def test_ends_of_a_stage_are_the_last_part_of_a_chain_or_all_parallel_parts(planned: Planned) -> None:
    graph = planned(
        "stages.corpus.sources.copy={}",
        'sources.copy={url: "installed:stdlib", format: code, include: ["json/*.py"]}',
    ).graph
    assert graph.ends_of("pretrain") == ["pretrain/3"]
    assert graph.ends_of("corpus") == ["corpus/notes", "corpus/copy"]
    assert graph.ends_of("nothing") == []
