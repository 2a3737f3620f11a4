"""Equal parts of several stages are one artifact."""

from __future__ import annotations

from collections.abc import Callable

from flows.planning.plan import Plan

Planned = Callable[..., Plan]


def test_what_two_stages_need_alike_is_made_once(chat: Planned) -> None:
    graph = chat("stages.chat-model.from=sft", "stages.chat-model.evaluations=[]").graph
    assert graph.nodes["preferences/model"].fingerprint == graph.nodes["chat-model"].fingerprint
    assert graph.nodes["preferences/model"].fingerprint == graph.nodes["evaluate-sft/model"].fingerprint
    assert graph.duplicate_of(graph.nodes["evaluate-sft/prompts"]) is None
    assert graph.duplicate_of(graph.nodes["evaluate-qrpo/prompts"]) == "evaluate-sft/prompts"
    totals = chat().to_json()["totals"]["to_do"]
    assert (
        totals["parts"]
        == len({(node.path, node.end_step) for node in chat().graph.nodes.values()})
        < len(chat().graph.nodes)
    )
    assert graph.nodes["evaluate-sft/prompts"].fingerprint == graph.nodes["evaluate-qrpo/prompts"].fingerprint
    assert (
        graph.nodes["evaluate-sft/completions"].fingerprint
        != graph.nodes["evaluate-qrpo/completions"].fingerprint
    )
