"""Why a part runs again: the field with both values, or the input that changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from flows.planning.rerun_reason import LOOKED_AT
from infra.store import Store
from infra.store.documents import Identity
from specs.recipe import load
from tests.flows.conftest import finish
from tests.recipes import RECIPE, write_recipe

Planned = Callable[..., Plan]


def to_do(plan: Plan) -> list[str]:
    return [name for name, step in plan.steps.items() if step.action != "reuse"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.export.tolerance=1e-3", ["export"]),
        ("stages.evaluate.samples=5", ["evaluate"]),
        ("stages.cooldown.optimizer.lr=2e-4", ["cooldown", "evaluate", "export"]),
        ("stages.cooldown.schedule.final=0.0", ["cooldown", "evaluate", "export"]),
        ("stages.second.seed=7", ["second", "pretrain/2", "pretrain/3", "cooldown", "evaluate", "export"]),
        ("stages.pretrain.global_batch_size.12 steps=16", ["pretrain/3", "cooldown", "evaluate", "export"]),
        (
            "stages.pretrain.optimizer.weight_decay=0.2",
            ["pretrain/1", "pretrain/2", "pretrain/3", "cooldown", "evaluate", "export"],
        ),
    ],
)
def test_edit_reruns_only_changed_and_later_stages(
    planned: Planned, override: str, expected: list[str]
) -> None:
    finish(planned())
    plan = planned(override)
    assert to_do(plan) == expected
    field, _, value = override.rpartition("=")
    name = field.split(".")[2]
    assert name in plan.steps[expected[0]].reason or name == "global_batch_size"
    assert (
        f"-> {float(value):g}" in plan.steps[expected[0]].reason
        or f"-> {value}" in plan.steps[expected[0]].reason
    )


def test_the_reason_names_field_old_value_and_new_value(planned: Planned) -> None:
    finish(planned())
    plan = planned("stages.cooldown.optimizer.lr=2e-4")
    assert plan.steps["cooldown"].reason == "optimizer.lr: 0.01 -> 0.0002"
    assert plan.steps["export"].reason.startswith("cooldown changed")


UNRELATED = """\
name: other
sources:
  rows: {{url: "{documents}", format: jsonl, include: ["*.jsonl"], text_column: text}}
stages:
  tokenizer: {{kind: tokenizer, sources: [rows], vocab_size: 384, bytes_per_source: 9_000}}
  corpus: {{kind: corpus, tokenizer: tokenizer, sources: {{rows: {{filters: [{{filter: length}}]}}}}}}
  main: {{kind: mixture, weights: {{corpus/rows: 3}}, max_repetition: 1000, seed: 7}}
  pretrain:
    kind: pretrain
    model: {{dim: 64, n_layers: 3, n_heads: 4, n_kv_heads: 2, head_dim: 32, ffn_dim: 96, vocab_size: 384}}
    mixture: main
    sequence_length: 16
    global_batch_size: 2
    budget: 9 steps
    optimizer: {{name: adamw, lr: 3e-3}}
    schedule: {{warmup: 2 steps}}
  export: {{kind: export, from: pretrain, tolerance: 1e-3}}
"""


def test_parts_of_a_new_recipe_are_not_compared_with_those_of_an_unrelated_one(
    planned: Planned, store: Store, tmp_path: Path
) -> None:
    finish(planned())
    rows = "".join(json.dumps({"text": f"row {row}, of something else"}) + "\n" for row in range(200))
    (tmp_path / "other" / "documents").mkdir(parents=True)
    (tmp_path / "other" / "documents" / "rows.jsonl").write_text(rows)
    plan = make(load(write_recipe(tmp_path / "other", UNRELATED)), store)
    assert {name: step.reason for name, step in plan.steps.items()} == dict.fromkeys(plan.steps, "new")


def test_a_part_with_other_inputs_and_another_name_is_new_however_many_settings_it_shares(
    planned: Planned, store: Store, tmp_path: Path
) -> None:
    finish(planned())
    path = write_recipe(
        tmp_path / "other",
        RECIPE.replace("cooldown:", "annealing:").replace("from: cooldown", "from: annealing"),
    )
    plan = make(
        load(path, ["name=other", "stages.tokenizer.vocab_size=640", "stages.pretrain.model.vocab_size=640"]),
        store,
    )
    assert plan.steps["annealing"].reason == "new"


def test_a_part_is_compared_with_the_stored_one_of_its_name_before_more_similar_ones(
    store: Store, tmp_path: Path
) -> None:
    source = '{{url: "{documents}", format: text, include: ["*.txt"]}}'
    text = RECIPE.replace("  notes:", f"  more: {source}\n  notes:")
    text = text.replace(
        "{{notes: {{holdout: 0.2}}}}", "{{more: {{holdout: 0.3}}, notes: {{holdout: 0.2, pii: false}}}}"
    )
    path = write_recipe(tmp_path, text)
    finish(make(load(path), store))
    plan = make(load(path, ["name=renamed", "stages.corpus.sources.notes={holdout: 0.4}"]), store)
    assert "against" not in plan.steps["corpus/notes"].reason
    assert "holdout: 0.2 -> 0.4" in plan.steps["corpus/notes"].reason


def test_a_part_of_a_renamed_recipe_is_compared_with_the_one_that_shares_most_of_it(
    planned: Planned,
) -> None:
    finish(planned())
    plan = planned("name=renamed", "stages.cooldown.optimizer.lr=2e-4")
    assert plan.steps["cooldown"].reason == "optimizer.lr: 0.01 -> 0.0002"


def test_of_many_artifacts_of_a_kind_those_that_last_runs_made_are_compared(
    planned: Planned, store: Store
) -> None:
    finish(planned())
    export = planned().graph.nodes["export"]
    identity = store.document(f"{export.path}/identity.json", Identity)
    for number in range(LOOKED_AT):  # which sort after every fingerprint, but for one in 16**29
        other = identity.model_copy(update={"name": "another", "fingerprint": f"{number:f>32}", "inputs": {}})
        store.write_document(f"export/{other.fingerprint}/identity.json", other)
    plan = planned("name=renamed", "stages.export.tolerance=1e-3")
    assert plan.steps["export"].reason.startswith("tolerance: ")
