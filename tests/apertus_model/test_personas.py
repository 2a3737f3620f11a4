from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from apertus_model.data.rows import Rows
from apertus_model.prompt_format import GenerationError
from apertus_model.stages.completions import DrawnPersonas, with_system
from infra.store import Artifact
from specs.errors import StageError
from specs.stages.preference_data import Personas
from tests.apertus_model.preference_artifacts import encoder_of, put_model, put_rows

NAMES = ["a nurse", "a judge from Uri", "a child of six"]


@pytest.fixture
def personas(tmp_path: Path) -> dict[str, Any]:
    lines = [json.dumps({"persona": f" {name}\n"}) for name in [*NAMES, " "]]
    (tmp_path / "personas.jsonl").write_text("\n".join(lines))
    return {
        "url": str(tmp_path / "personas.jsonl"),
        "format": "jsonl",
        "text_column": "persona",
        "template": "You are {persona}.",
    }


def test_a_persona_depends_on_seed_and_prompt_and_all_are_drawn(personas: dict[str, Any]) -> None:
    prompts = [{"id": str(number), "messages": []} for number in range(300)]
    drawn = DrawnPersonas(Personas(**personas))
    found = [drawn.of(prompt) for prompt in prompts]
    assert set(found) == set(NAMES) and min(Counter(found).values()) > 70
    assert [drawn.of(prompt) for prompt in reversed(prompts)] == found[::-1]
    assert [DrawnPersonas(Personas(**personas, seed=1)).of(prompt) for prompt in prompts] != found


def test_files_without_a_persona_are_an_error_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(StageError, match=r"there is no persona in .*empty\.txt\. Fix: correct the url"):
        DrawnPersonas(Personas(url=str(tmp_path / "empty.txt"), format="text"))


def test_the_system_message_of_a_prompt_follows_its_persona() -> None:
    asked = {"role": "user", "content": "Why?"}
    assert with_system([asked], "Be x.") == [{"role": "system", "content": "Be x."}, asked]
    own = [{"role": "system", "content": "Answer in JSON."}, asked]
    assert with_system(own, "Be x.") == [{"role": "system", "content": "Be x.\n\nAnswer in JSON."}, asked]
    assert own[0]["content"] == "Answer in JSON."


def complete(
    bench: Any, tokenizer: Artifact, personas: dict[str, Any], *, max_new_tokens: int = 5
) -> tuple[Artifact, Artifact, list[dict[str, Any]]]:
    model, encoder = put_model(bench, tokenizer), encoder_of(tokenizer)
    rows = []
    for number in range(4):
        messages = [{"role": "user", "content": f"What is {number}?"}]
        tokens = encoder.prompt(messages).tolist()
        rows.append({"id": f"p{number}", "messages": messages, "tools": None, "tokens": tokens, "text": ""})
    prompts = put_rows(bench, "prompts", "p", rows, {"end_of_turn_id": encoder.end_of_turn_id, "pad_id": 10})
    sampling = {"n": 1, "temperature": 0, "max_new_tokens": max_new_tokens, "batch_size": 2}
    spec = {"sampling": sampling, "personas": personas}
    found = bench.run("completions", "c", spec, {"model": model, "prompts": prompts})
    return found, model, rows


def test_a_model_answers_the_prompt_with_its_persona_before_it(
    bench: Any, tokenizer: Artifact, personas: dict[str, Any]
) -> None:
    """Compared with transformers, which completes the messages rendered by the folder's own chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found, model, prompts = complete(bench, tokenizer, personas)
    folder = model.local("config.json").parent
    other, its = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    template = (Path(tokenizer.local("chat_template.jinja"))).read_text()
    for row, prompt in zip(Rows(found), prompts, strict=True):
        assert row["persona"] in NAMES
        system = {"role": "system", "content": f"You are {row['persona']}."}
        ids = its.apply_chat_template(
            [system, *prompt["messages"]],
            chat_template=template,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        assert ids.shape[1] > len(prompt["tokens"])
        answer = other.generate(ids, max_new_tokens=5, do_sample=False, repetition_penalty=1.0)
        assert row["completions"][0]["tokens"] == answer[0, ids.shape[1] :].tolist()
    assert len({row["persona"] for row in Rows(found)}) > 1
    assert found.manifest.facts["model"] == model.path


def test_a_persona_that_leaves_no_room_in_the_context_is_an_error(
    bench: Any, tokenizer: Artifact, personas: dict[str, Any]
) -> None:
    with pytest.raises(GenerationError, match="whose context leaves room for 28 beside max_new_tokens"):
        complete(bench, tokenizer, personas, max_new_tokens=100)
