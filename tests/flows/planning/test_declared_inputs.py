"""Sources that are declared: planned where the data are not, refused by a run, and of no weight where the
data are."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.__main__ import app
from flows.planning.parts import builder as builder_module
from flows.planning.plan import Plan, make
from flows.planning.stage_choice import select
from infra.store import Artifact, Attempt, Store
from specs.errors import SpecError
from specs.recipe import load
from tests.flows.conftest import finish, job_of
from tests.recipes import RECIPE, write_recipe

Planned = Callable[..., Plan]
DECLARED = RECIPE.replace('include: ["*.txt"]', 'include: ["*.txt"], declared: {{tokens: 10k tokens}}')
ABSENT = DECLARED.replace('"{documents}"', "nowhere/notes")


@pytest.fixture
def planned_as(tmp_path: Path, store: Store) -> Planned:
    def plan(text: str, *overrides: str, **options: Any) -> Plan:
        return make(load(write_recipe(tmp_path, text), overrides), store, **options)

    return plan


def notes_of(plan: Plan, word: str) -> list[str]:
    return [note for note in plan.graph.notes if word in note]


def test_unavailable_source_is_planned_with_its_declared_size(planned_as: Planned) -> None:
    plan = planned_as(ABSENT)
    (drawn,) = [usage for usage in plan.source_usage if usage.stage == "pretrain"]
    # a fifth of 10,000 is held out
    assert (drawn.available, drawn.exact, drawn.declared) == (8000, False, True)
    assert drawn.tokens == (12 * 4 + 4 * 8) * 32
    assert drawn.sequences == 7999 // 32


def test_parts_that_depend_on_unavailable_inputs_are_reported(planned_as: Planned, tmp_path: Path) -> None:
    document = planned_as(ABSENT).to_json()
    assert [stage["declared"] for stage in document["stages"]] == [["notes"]] * len(document["stages"])
    assert document["declared"]["notes"]["url"] == f"{tmp_path}/nowhere/notes"
    assert document["declared"]["notes"]["tokens"] == 10_000
    assert {stage["action"] for stage in document["stages"]} == {"run"}


def test_a_run_refuses_before_anything_starts_and_names_source_and_url(
    tmp_path: Path, store: Store, planned_as: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        SpecError, match=r"sources\.notes.*'notes' is unavailable.*put the data at .*/nowhere/notes"
    ):
        select(planned_as(ABSENT), None, None)
    monkeypatch.setattr(
        "flows.cli.commands.run._run", lambda *arguments: pytest.fail("something was started")
    )
    result = CliRunner().invoke(app, ["run", str(write_recipe(tmp_path, ABSENT)), "--store", store.url])
    assert result.exit_code == 2


def test_parts_without_unavailable_inputs_can_run(planned_as: Planned) -> None:
    both = DECLARED.replace(
        "sources:\n",
        "sources:\n  other: {{url: nowhere, format: text, declared: {{tokens: 5k tokens}}}}\n",
        1,
    ).replace("sources: {{notes: {{holdout: 0.2}}}}", "sources: {{notes: {{holdout: 0.2}}, other: {{}}}}")
    plan = planned_as(both)
    assert plan.steps["corpus/other"].unavailable == ("other",)
    assert plan.steps["pretrain/1"].unavailable == ()
    assert "tokenizer" in select(plan, "tokenizer", None)
    with pytest.raises(SpecError, match="'other' is unavailable"):
        select(plan, "corpus", None)


def test_declaration_of_available_data_bears_no_identity(planned_as: Planned) -> None:
    stated, silent = planned_as(DECLARED), planned_as(RECIPE)
    assert [node.path for node in stated.graph.nodes.values()] == [
        node.path for node in silent.graph.nodes.values()
    ]
    assert not any(step.unavailable for step in stated.steps.values())


def test_unavailable_sources_at_two_urls_are_two_corpora(planned_as: Planned) -> None:
    here, there = planned_as(ABSENT), planned_as(ABSENT.replace("nowhere/", "elsewhere/"))
    assert here.graph.nodes["corpus/notes"].path != there.graph.nodes["corpus/notes"].path


def test_nothing_is_looked_for_under_a_provisional_fingerprint(planned_as: Planned) -> None:
    finish(planned_as(ABSENT))
    assert {step.action for step in planned_as(ABSENT).steps.values()} == {"run"}


def test_remote_url_is_read_only_with_ask_network(
    planned_as: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def list_source(source: Any) -> None:
        asked.append(source.url)
        raise builder_module.SourceError(f"cannot list {source.url}")

    monkeypatch.setattr(builder_module, "list_source", list_source)
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail("a plan used the network"))
    remote = DECLARED.replace('"{documents}"', "s3://bucket/notes")
    assert planned_as(remote, ask_network=False).steps["corpus/notes"].unavailable == ("notes",)
    assert asked == []
    planned_as(remote)
    assert asked == ["s3://bucket/notes"]


def test_a_missing_source_that_is_not_declared_is_an_error(planned_as: Planned) -> None:
    with pytest.raises(SpecError, match=r"there is nothing at .*/nowhere/notes"):
        planned_as(RECIPE.replace('"{documents}"', "nowhere/notes"))


def test_a_declared_source_that_is_too_small_is_refused(planned_as: Planned) -> None:
    with pytest.raises(
        SpecError, match="'corpus/notes' through mixture 'main', which is declared with 400 training tokens"
    ):
        planned_as(
            ABSENT.replace("10k tokens", "500 tokens").replace("max_repetition: 100", "max_repetition: 2")
        )


def test_a_corpus_without_declared_tokens_is_refused_with_the_recipe(planned_as: Planned) -> None:
    with pytest.raises(SpecError, match="source 'notes' declares no tokens"):
        planned_as(ABSENT.replace("tokens: 10k tokens", "documents: 30"))


@pytest.mark.parametrize("size", ["5 steps", "0 tokens"])
def test_malformed_size_is_refused(planned_as: Planned, size: str) -> None:
    with pytest.raises(SpecError, match="is not the size of a source"):
        planned_as(ABSENT.replace("10k tokens", size))


@pytest.mark.parametrize(("tokens", "noted"), [(10_400, False), (10_600, True), (9400, True)])
def test_declaration_off_by_more_than_five_percent_is_noted(
    planned_as: Planned, tokens: int, noted: bool
) -> None:
    plan = planned_as(DECLARED)
    attempt = Attempt(job_of(plan, plan.graph.nodes["corpus/notes"]), plan.store)
    attempt.begin()
    attempt.commit(metrics={"tokens": tokens, "documents": 30, "train": {"tokens": 8000}})
    again = planned_as(DECLARED)
    assert Artifact(plan.store, again.graph.nodes["corpus/notes"].path).complete
    expected = [f"source notes declares 10,000 tokens; 'corpus/notes' has {tokens:,} ({tokens / 10_000:.2f})"]
    assert notes_of(again, "declares") == (expected if noted else [])


def test_files_that_cannot_hold_what_is_declared_are_noted_before_they_are_read(
    tmp_path: Path, planned_as: Planned
) -> None:
    plan = planned_as(DECLARED.replace("10k tokens", "1M tokens"))
    files = list((tmp_path / "documents").glob("*.txt"))
    # a byte is a token at most; a begin and an end each
    bound = sum(file.stat().st_size for file in files) + 2 * len(files)
    assert notes_of(plan, "declares") == [
        f"source notes declares 1,000,000 tokens; its files can hold {bound:,} at most"
    ]


OTHER_CORPORA = ABSENT.replace(
    "{{kind: tokenizer, sources: [notes], vocab_size: 512, bytes_per_source: 50_000}}",
    "{{kind: tokenizer, path: nowhere/tokenizer, vocab_size: 512}}",
)


def test_only_assumed_files_may_be_unavailable(planned_as: Planned, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"there is nothing at .*/nowhere/tokenizer"):
        planned_as(OTHER_CORPORA)
    with pytest.raises(SpecError, match=r"there is nothing at .*/nowhere/tokenizer"):
        planned_as(OTHER_CORPORA + "assumed_inputs: {{files: [nowhere/token]}}\n")
    plan = planned_as(OTHER_CORPORA + "assumed_inputs: {{files: [nowhere]}}\n")
    assert plan.steps["tokenizer"].unavailable == (f"{tmp_path}/nowhere/tokenizer",)
    with pytest.raises(SpecError, match="/nowhere/tokenizer' is unavailable"):
        select(plan, "tokenizer", None)


def test_a_source_states_its_own_size_wherever_it_lies(planned_as: Planned) -> None:
    with pytest.raises(SpecError, match=r"there is nothing at .*/nowhere/notes"):
        planned_as(
            RECIPE.replace('"{documents}"', "nowhere/notes") + "assumed_inputs: {{files: [nowhere]}}\n"
        )


MODEL = """\
name: tuned
sources:
  talks: {url: nowhere/talks, format: chat, declared: {documents: 100}}
assumed_inputs:
  models: {"hf:nobody/nothing": {model: {flavour: mini}, context: 512, chat: true}}
stages:
  tokenizer: {kind: tokenizer, from: "hf:nobody/nothing"}
  chat: {kind: conversations, tokenizer: tokenizer, sources: {talks: {}}}
  sft:
    kind: sft
    from: "hf:nobody/nothing"
    conversations: chat
    global_batch_size: 4
    budget: 10 steps
    optimizer: {lr: 1e-4}
"""


def test_declared_model_provides_dimensions(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail("a plan used the network"))
    (tmp_path / "tuned.yaml").write_text(MODEL)
    plan = make(load(tmp_path / "tuned.yaml"), store, ask_network=False)
    sft = plan.graph.trajectories["sft"]
    assert sft.model.dim == 96
    assert sft.settings.sequence_length == 512
    assert set(plan.steps["sft"].unavailable) == {
        "talks",
        "hf:nobody/nothing",
        "hf:nobody/nothing (tokenizer)",
    }
