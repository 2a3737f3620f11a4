"""Parts of an evaluation of a reward: what it reads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from tests.flows.comparing import changed
from tests.recipes import CHAT, write_recipe

STAGE = """\
  measured:
    kind: evaluate_reward
    reward:
      judge: {{from: sft, constitution: "{documents}/constitution.md", pairwise: {{}}}}
      max_tokens: 128
    pairs: [chat]
    gates: [{{metric: accuracy/low, min: 0.5}}, {{metric: accuracy/source/chat/questions, min: 0.5}},
      {{metric: order_bias/high, max: 0.1}}, {{metric: outside, max: 0.5}}]
"""
Planned = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path, store: Store) -> Planned:
    def plan(*overrides: str, constitution: str = "1. Be kind.") -> Plan:
        path = write_recipe(tmp_path, CHAT + STAGE)
        (tmp_path / "documents" / "constitution.md").write_text(constitution)
        return make(load(path, overrides), store)

    return plan


def test_it_reads_the_pairs_the_judge_and_the_constitution(planned: Planned) -> None:
    graph = planned().graph
    assert set(graph.nodes["measured"].inputs) == {"conversations:0", "judge", "constitution"}
    assert {node.name for node in graph.of("measured")} == {"measured/judge", "measured"}


def test_another_constitution_measures_again_and_a_gate_does_not(planned: Planned) -> None:
    assert changed(planned(), planned(constitution="1. Be brief.")) == {"measured"}
    assert not changed(planned(), planned("stages.measured.gates=[]", "stages.measured.pairs_per_unit=3"))


def test_a_function_needs_neither(planned: Planned) -> None:
    plan = planned("stages.measured.reward=grounded-answer", "stages.measured.gates=[]")
    assert set(plan.graph.nodes["measured"].inputs) == {"conversations:0"}


def test_a_gate_on_a_metric_that_there_will_not_be_is_refused(planned: Planned) -> None:
    with pytest.raises(SpecError, match="'measured' will not have a metric 'order_bias/high'"):
        planned("stages.measured.reward=grounded-answer")


def test_a_part_that_is_named_twice_is_refused(planned: Planned) -> None:
    with pytest.raises(SpecError, match="a part is repeated; name it once"):
        planned("stages.measured.pairs=[chat, chat]")
