from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from apertus_model.chat.encoder import ChatEncoder
from apertus_model.data.rows import write_rows
from apertus_model.data.tokens.vocabulary import train
from apertus_model.stages.labelled_pairs import write_pairs
from flows.inspection.common import Options
from flows.inspection.inspectors import inspector_of
from flows.inspection.rows import KINDS, READERS
from flows.planning.plan import Plan, make
from flows.terminal import make_console
from infra.store import Attempt, Store
from specs.errors import SpecError
from specs.recipe import load
from tests.apertus_model.preference_artifacts import dialogue, put_conversations
from tests.flows.conftest import job_of
from tests.recipes import CHAT, write_recipe


def _commit(
    plan: Plan, name: str, rows: Sequence[dict[str, Any]], facts: dict[str, Any] | None = None
) -> None:
    node = plan.graph.nodes[name]
    attempt = Attempt(job_of(plan, node), plan.store)
    attempt.begin()
    attempt.commit(metrics={}, facts=write_rows(attempt, node.kind, rows))


@pytest.fixture
def stored(chat: Callable[..., Plan]) -> Plan:
    """Prompts with an offline completion, two sampled ones, their rewards, and a pair."""
    plan = chat()
    prompts = [
        {"id": f"p{n}", "text": f"question {n}?", "completions": [{"text": "offline"}]} for n in range(3)
    ]
    sampled = [{"text": "good", "finished": True}, {"text": "endless", "finished": False}]
    _commit(plan, "preferences/prompts", prompts)
    _commit(plan, "preferences/completions", [{"id": f"p{n}", "completions": sampled} for n in range(3)])
    _commit(
        plan,
        "preferences/rewards",
        [{"id": f"p{n}", "offline": [0.5], "sampled": [n, -1.25]} for n in range(3)],
    )
    attempt = Attempt(job_of(plan, plan.graph.nodes["preferences/pairs"]), plan.store)
    attempt.begin()
    side = {"text": "good", "reward": 2.0, "quantile": 1.0, "origin": "sampled"}
    other = {"text": "own", "reward": 0.5, "quantile": 0.25, "origin": "offline", "model": "hf:a"}
    row = {"id": "p2", "prompt": "question 2?", "chosen": side, "rejected": other}
    attempt.write_bytes("pairs.jsonl", json.dumps(row).encode() + b"\n")
    attempt.commit(metrics={})
    return plan


def _found(plan: Plan, name: str, **options: Any) -> tuple[Any, str]:
    """What is collected, and what is printed."""
    inspector, node = inspector_of(plan, name, Options(**options))
    found = inspector.collect(plan, node, Options(**options))
    console = make_console(width=100, file=io.StringIO())
    inspector.show(console, json.loads(json.dumps(found)))
    return found, console.file.getvalue()  # type: ignore[attr-defined]


def test_rewards_are_shown_beside_their_completions(stored: Plan) -> None:
    found, printed = _found(stored, "preferences/rewards", sample=2)
    assert (found["count"], [item["id"] for item in found["items"]]) == (3, ["p2"])
    assert [(answer["text"], answer["about"]) for answer in found["items"][0]["answers"]] == [
        ("offline", "offline, reward 0.5"),
        ("good", "sampled, reward 2"),
        ("endless", "sampled, cut off, reward -1.25"),
    ]
    assert "question 2?" in printed and "sampled, cut off, reward -1.25\nendless\n" in printed


def test_prompts_have_offline_completions_and_completions_sampled_ones(stored: Plan) -> None:
    found, _ = _found(stored, "preferences/prompts", limit=1)
    assert [answer["text"] for item in found["items"] for answer in item["answers"]] == ["offline"]
    found, _ = _found(stored, "preferences/completions", limit=1)
    assert [answer["text"] for item in found["items"] for answer in item["answers"]] == ["good", "endless"]


def test_both_sides_of_a_pair_are_shown_with_their_worth(stored: Plan) -> None:
    _, printed = _found(stored, "preferences/pairs")
    assert "chosen: sampled, reward 2, quantile 1\ngood\n" in printed
    assert "rejected: offline hf:a, reward 0.5, quantile 0.25\nown\n" in printed


def _put_tokenizer(plan: Plan) -> Tokenizer:
    attempt = Attempt(job_of(plan, plan.graph.nodes["tokenizer"]), plan.store)
    attempt.begin()
    tokenizer = train(["What is a kite? It needs wind."] * 9, 512, 100)
    attempt.write_bytes("tokenizer.json", tokenizer.to_str().encode())
    attempt.commit(metrics={}, facts={"vocab_size": 512, "bos_id": 1, "eos_id": 2, "pad_id": 3})
    return tokenizer


def test_labelled_pairs_are_shown_with_both_sides_and_the_margin(store: Store, tmp_path: Path) -> None:
    judge = "kind: reward_model, from: sft, pairs: [chat], global_batch_size: 4, budget: 4 steps"
    recipe = CHAT + "  judge: {{" + judge + ", optimizer: {{lr: 1e-4}}}}\n"
    plan = make(load(write_recipe(tmp_path, recipe)), store)
    node = plan.graph.nodes["judge/pairs"]
    encoder = ChatEncoder(_put_tokenizer(plan))
    rows = [
        {
            "prompt": encoder.prompt(dialogue(question, "").prompt).tolist(),
            "chosen": encoder.completion("Wind.").tolist(),
            "rejected": encoder.completion(f"{question} No.").tolist(),
            "margin": margin,
            "source": 0,
        }
        for question, margin in (("What is a kite?", None), ("And rain?", 1.5))
    ]
    attempt = Attempt(job_of(plan, node), plan.store)
    attempt.begin()
    _, names = write_pairs(rows, tmp_path, "train")
    for name in names:
        attempt.put(tmp_path / name, name)
    attempt.commit(metrics={})
    found, printed = _found(plan, "judge/pairs", limit=9)
    assert [item["pieces"][0][1].count("And rain?") for item in found["items"]] == [0, 1]
    assert [answer["text"] for answer in found["items"][1]["answers"]] == [
        "Wind.<|assistant_end|>",
        "And rain? No.<|assistant_end|>",
    ]
    assert "chosen, margin 0\nWind." in printed and "chosen, margin 1.5\nWind." in printed


def test_trained_tokens_of_conversations_are_marked_and_rejected_answers_follow(
    chat: Callable[..., Plan],
) -> None:
    plan = chat()
    _put_tokenizer(plan)
    node = plan.graph.nodes["chat/questions"]
    bench = SimpleNamespace(job=lambda *arguments, **more: job_of(plan, node))
    pair = dialogue("And rain?", "No.", "Yes.", preference=True)
    talks = [dialogue("What is a kite?", "It needs wind."), pair]
    put_conversations(bench, node.fingerprint, plan.graph.nodes["tokenizer"].artifact(plan.store), talks)
    found, printed = _found(plan, "chat", limit=9)
    assert [item["id"] for item in found["items"]] == ["What is a kite?", "And rain?"]
    trained = ["".join(text for marked, text in item["pieces"] if marked) for item in found["items"]]
    assert trained == ["It needs wind.<|assistant_end|>", "No.<|assistant_end|>"]
    assert "<|user_start|>What is a kite?<|user_end|>" in found["items"][0]["pieces"][0][1]
    assert "chat/questions: 2 rows" in printed
    assert [item["answers"] for item in found["items"]] == [[], [{"text": "Yes.", "about": "rejected"}]]
    assert "rejected\nYes.\n" in printed


def test_rows_that_are_not_there_and_options_of_others_are_refused(stored: Plan) -> None:
    with pytest.raises(SpecError, match=r"has no row 3.*from 0 to 2"):
        _found(stored, "preferences/prompts", sample=3)
    with pytest.raises(SpecError, match=r"--step applies to a training stage"):
        _found(stored, "preferences/prompts", step=3)
    with pytest.raises(SpecError, match=r"'preferences' has 4 parts"):
        _found(stored, "preferences")
    with pytest.raises(SpecError, match=r"has not been made yet"):
        _found(stored, "chat")


def test_every_kind_has_a_reader() -> None:
    assert READERS.keys() == {*KINDS}
