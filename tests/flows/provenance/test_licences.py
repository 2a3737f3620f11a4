"""The card of a model names the models that answered and scored for its training, with their licences."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from apertus_model.model_card import model_card
from flows.planning.plan import Plan, make
from infra.store import Attempt, Store
from specs.job import InputRef
from specs.recipe import load
from tests.flows.conftest import finish, job_of
from tests.flows.finished import spec_of
from tests.models import other_model_folder
from tests.recipes import CHAT, write_recipe

JUDGED = (
    CHAT
    + """\
  judge: {{kind: reward_model, from: sft, pairs: [chat], global_batch_size: 4, budget: 40 steps,
    optimizer: {{lr: 1e-4}}}}
"""
)
LICENSED = "---\nlicense: {}\n---\n# A model\n"
Card = Callable[..., str]


@pytest.fixture
def card(tmp_path: Path, store: Store) -> Card:
    """`card("a.b=c", ...)`: of the aligned model of a recipe with overrides, as if it had run."""

    def plan(*overrides: str) -> Plan:
        return make(load(write_recipe(tmp_path, JUDGED), overrides), store)

    def card(*overrides: str) -> str:
        made = plan(*overrides)
        recorded = [
            name for name, node in made.graph.nodes.items() if "license" in type(node.part).model_fields
        ]
        finish(made, *(name for name in made.graph.nodes if name not in recorded))
        for name in recorded:
            job = job_of(made, made.graph.nodes[name]).model_copy(update={"spec": spec_of(made, name)})
            attempt = Attempt(job, store)
            attempt.begin()
            attempt.commit(metrics={})
        node = made.graph.nodes["qrpo"]
        read = InputRef(
            kind=node.kind,
            fingerprint=node.fingerprint,
            name=node.name,
            path=node.path,
            step=node.end_step,
            checkpoint=node.artifact(store).checkpoint(node.end_step or 0).folder,
        )
        model = made.graph.trajectories["pretrain"].model
        return model_card(store, read, [], title="tiny", model=model, sequence_length=128)

    return card


def test_models_that_answered_and_scored_are_named(card: Card, tmp_path: Path) -> None:
    sampler, scorer = other_model_folder(tmp_path / "sampler"), tmp_path / "scorer"
    (sampler / "README.md").write_text(LICENSED.format("llama3.1"))
    scorer.mkdir()
    (scorer / "config.json").write_text("{}")
    (scorer / "README.md").write_text(LICENSED.format("cc-by-nc-4.0"))
    written = card(
        f"stages.preferences.sampler='hf:{sampler}'", f"stages.preferences.reward={{model: {scorer}}}"
    )
    assert f"| preferences/completions | hf:{sampler} | llama3.1 |" in written
    assert f"| preferences/rewards | {scorer} | cc-by-nc-4.0 |" in written
    assert "beginning with" not in written  # neither is what was trained


def test_a_model_of_a_server_has_no_known_licence(card: Card) -> None:
    server = "engine: server, server: {url: 'http://host/v1', model: big, api: chat}"
    written = card(f"stages.preferences.completions={{n: 4, max_new_tokens: 16, {server}}}")
    assert "| preferences/completions | big, of a server | not stated |" in written
    assert "preferences/rewards |  |" not in written


def test_the_model_card_tells_models_that_judged_from_models_that_were_trained(card: Card) -> None:
    written, judged = card(), card("stages.preferences.reward={from: judge}")
    sampled = "| preferences/completions | sft | trained here |"
    assert sampled in written and sampled in judged
    assert "| preferences/rewards | judge | trained here |" in judged
    assert "| preferences/rewards | judge" not in written
    tokens = [re.search(r"trained on ([\d,]+) tokens", text) for text in (written, judged)]
    assert tokens[0] and tokens[1] and tokens[0][1] == tokens[1][1]
