"""The page on conversations names every column, key and reason there is, and its recipe runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apertus_model.chat import messages
from apertus_model.chat.template import template_source
from apertus_model.data.conversations import readers as conversation_readers
from apertus_model.data.tokens.vocabulary import train
from flows.planning.plan import make
from infra.store import Artifact, Store
from specs.recipe import load
from specs.stages.conversations import CONTROL_COLUMNS
from tests.models import MODEL, model_folder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "conversations.md").read_text()
HUB = "hf:swiss-ai/Apertus-8B-Instruct-2509"
SMALL = ["sequence_length=128", "global_batch_size=1", "budget=2 steps", "precision={param: float32}"]


def _block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    return str(text)


def test_the_page_names_every_column_and_key() -> None:
    columns = {*CONTROL_COLUMNS, *conversation_readers.LABELS, *conversation_readers.NOT_TEXT, "labels"}
    keys = {*messages.TRAINS, *messages.NOTES, *(key for keys in messages.KEYS.values() for key in keys)}
    assert {name for name in columns | keys if f"`{name}`" not in PAGE} == set()


def test_the_page_names_every_reason_for_which_a_row_is_rejected() -> None:
    sources = [Path(module.__file__ or "").read_text() for module in (messages, conversation_readers)]
    reasons = {name for text in sources for name in re.findall(r'(?:Error|Rejection)\(\s*"(\w+)"', text)}
    assert {"nothing_trained", "unwanted_answer", "bad_tool_result"} < reasons
    reasons |= {conversation_readers.NO_COLUMNS, "bad_weight", "bad_label", "bad_enable_thinking", "bad_id"}
    assert {reason for reason in reasons if f"`{reason}`" not in PAGE} == set()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe and the rows of the page, with a tiny model in place of the hub's."""
    import torch
    from transformers import ApertusConfig, ApertusForCausalLM

    folder = model_folder(tmp_path / "model")
    for stale in folder.glob("model*"):
        stale.unlink()
    torch.manual_seed(0)
    config = ApertusConfig.from_pretrained(folder, vocab_size=MODEL.vocab_size)
    ApertusForCausalLM(config).save_pretrained(folder)
    train([PAGE], MODEL.vocab_size, 100).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template_source())
    (tmp_path / "answers.jsonl").write_text(_block("jsonl"))
    path = tmp_path / "recipe.yaml"
    text = _block("yaml").replace(HUB, f"hf:{folder}")
    path.write_text(text.replace("url: answers.jsonl", f"url: {tmp_path / 'answers.jsonl'}"))
    return path


def test_the_recipe_of_the_page_plans_pairs_and_their_reference(recipe: Path, tmp_path: Path) -> None:
    plan = make(load(recipe, [f"stages.dpo.{field}" for field in SMALL]), Store.open(str(tmp_path / "store")))
    names = {node.name for node in plan.graph.of("dpo")}
    assert names == {"dpo/tokenizer", "dpo/import", "dpo/pairs", "dpo/log_probabilities", "dpo"}


@pytest.mark.slow
def test_the_recipe_of_the_page_runs_and_begins_at_the_reference(recipe: Path, tmp_path: Path) -> None:
    overrides = [f"stages.dpo.{field}" for field in SMALL]
    words = [word for override in overrides for word in ("--set", override)]
    store = str(tmp_path / "store")
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(recipe), "--store", store, *words],
        cwd=ROOT,
        env=os.environ | {"PREFECT_HOME": str(tmp_path / "prefect"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plan = make(load(recipe, overrides), Store.open(store))
    assert plan.pending == []
    pairs, dpo = (plan.graph.nodes[name] for name in ("dpo/pairs", "dpo"))
    assert Artifact(plan.store, pairs.path).manifest.metrics["train"]["pairs"] == 2
    rows = [row for row in Artifact(plan.store, dpo.path, dpo.end_step).history() if "loss" in row]
    assert len(rows) == 2
    assert (rows[0]["log_ratio_chosen"], rows[0]["log_ratio_rejected"], rows[0]["margin"]) == (0, 0, 0)
    assert rows[1]["margin"] != 0
