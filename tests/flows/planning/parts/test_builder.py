"""Equal parts of several stages are one artifact."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.planning.plan import Plan
from specs.errors import SpecError

Planned = Callable[..., Plan]


def test_what_two_stages_need_alike_is_made_once(chat: Planned) -> None:
    graph = chat("stages.chat-model.from=sft", "stages.chat-model.evaluations=[]").graph
    assert graph.nodes["preferences/model"].fingerprint == graph.nodes["chat-model"].fingerprint
    assert graph.nodes["preferences/model"].fingerprint == graph.nodes["evaluate-sft/model"].fingerprint
    assert graph.duplicates.get("evaluate-sft/prompts") is None
    assert graph.duplicates.get("evaluate-qrpo/prompts") == "evaluate-sft/prompts"
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


SUMS = "stages.pretrain.model.depth_average={}"


@pytest.mark.parametrize("field", ["depth_average={}", "mamba={layers: all}"])
def test_vllm_is_refused_for_a_model_that_it_cannot_compute(chat: Planned, field: str) -> None:
    model = f"stages.pretrain.model.{field}"
    chat(model)
    name = field.partition("=")[0]
    message = rf"stages\.preferences: vLLM cannot compute model\.{name}\. Fix: use engine: transformers"
    with pytest.raises(SpecError, match=message):
        chat(model, "stages.preferences.completions.engine=vllm")
    chat("stages.preferences.completions.engine=vllm")


def test_sums_of_earlier_layers_change_every_part_that_computes_the_model(chat: Planned) -> None:
    plain, summed = chat().graph, chat(SUMS).graph
    same = {name for name, node in plain.nodes.items() if summed.nodes[name].fingerprint == node.fingerprint}
    assert {"tokenizer", "corpus/notes", "chat/questions"} <= same
    assert not {"pretrain/1", "sft", "preferences/model", "qrpo", "chat-model"} & same
