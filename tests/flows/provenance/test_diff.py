"""Two recipes, stages or runs are compared part by part, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan
from flows.provenance import diff
from infra.store import Attempt, Store, runs
from tests.flows.conftest import finish, job_of
from tests.flows.finished import invoke, read_json, spec_of, trained

Planned = Callable[..., Plan]


def test_two_recipes_are_compared_part_by_part_with_identity_apart_from_execution(
    done: Plan, recipe: Path
) -> None:
    other = recipe.with_name("other.yaml")
    other.write_text(
        "extends: tiny.yaml\nstages: {cooldown: {optimizer: {lr: 2e-4}, micro_batch_size: 2}, pretrain:"
        " {micro_batch_size: 1}}\n"
    )
    document = read_json("diff", str(recipe), str(other), "--store", done.store.url, "--json")
    parts = {part["name"]: part for part in document["parts"]}
    assert {name: part["verdict"] for name, part in parts.items()} == (
        dict.fromkeys(["tokenizer", "corpus/notes", "main", "second"], "same")
        | dict.fromkeys(["pretrain/1", "pretrain/2", "pretrain/3"], "execution")
        | dict.fromkeys(["cooldown", "evaluate", "export"], "differs")
    )
    assert parts["cooldown"]["identity"] == [{"name": "optimizer.lr", "a": 0.01, "b": 0.0002}]
    execution = {change["name"] for change in parts["cooldown"]["execution"]}
    assert "micro_batch_size" in execution and "optimizer.lr" not in execution
    assert [change["name"] for change in parts["pretrain/1"]["execution"]] == ["micro_batch_size"]
    assert [change["name"] for change in parts["export"]["inputs"]] == ["checkpoint"]


def test_two_stages_of_one_recipe_are_compared_whatever_their_names(done: Plan, recipe: Path) -> None:
    (part,) = read_json("diff", f"{recipe}:pretrain/2", ":cooldown", "--store", done.store.url, "--json")[
        "parts"
    ]
    changes = {change["name"]: (change["a"], change["b"]) for change in part["identity"]}
    assert changes["kind"] == ("pretrain", "cooldown")
    assert changes["schedule.decay"] == ("none", "1-sqrt")


def test_stages_of_several_segments_are_compared_in_order(done: Plan, recipe: Path) -> None:
    parts = read_json("diff", f"{recipe}:pretrain", ":cooldown", "--store", done.store.url, "--json")["parts"]
    assert [(part["name"], part["verdict"]) for part in parts] == [
        ("pretrain/1 | cooldown", "differs"),
        ("pretrain/2", "only in A"),
        ("pretrain/3", "only in A"),
    ]


@pytest.mark.parametrize(
    ("point", "pairs"),
    [
        ("pretrain@step=8", [("pretrain/2", "other/1"), ("pretrain/3", "other/2")]),  # the end of a segment
        # inside of one
        (
            "pretrain@step=2",
            [("pretrain/1", "other/1"), ("pretrain/2", "other/2"), ("pretrain/3", "other/3")],
        ),
    ],
)
def test_a_branch_is_compared_with_what_it_branches_off(
    planned: Planned, recipe: Path, store: Store, point: str, pairs: list[tuple[str, str]]
) -> None:
    assert invoke("branch", str(recipe), point, "--name", "other", "--store", store.url).exit_code == 0
    other = str(recipe.with_name("other.yaml"))
    stages = read_json("diff", f"{recipe}:pretrain", f"{other}:other", "--store", store.url, "--json")[
        "parts"
    ]
    assert [part["name"] for part in stages if part["verdict"] == "differs"] == [
        f"{one} | {two}" for one, two in pairs
    ]
    swapped = read_json("diff", f"{other}:other", f"{recipe}:pretrain", "--store", store.url, "--json")[
        "parts"
    ]
    assert [part["name"] for part in swapped if part["verdict"] == "differs"] == [
        f"{two} | {one}" for one, two in pairs
    ]
    whole = read_json("diff", str(recipe), other, "--store", store.url, "--json")["parts"]
    assert {f"{one} | {two}" for one, two in pairs} <= {part["name"] for part in whole}


def test_equal_work_differs_in_stated_fields_only(done: Plan, planned: Planned, recipe: Path) -> None:
    other = recipe.with_name("other.yaml")
    # makes step 8 a milestone of `pretrain/1`
    more = "{kind: evaluate, from: pretrain@step=8, sources: [corpus/notes]}"
    other.write_text(
        f"extends: tiny.yaml\nstages: {{more: {more}, pretrain: {{checkpoint: {{milestones: [5]}}}}}}\n"
    )
    (part,) = read_json(
        "diff", f"{recipe}:pretrain/1", f"{other}:pretrain/1", "--store", done.store.url, "--json"
    )["parts"]
    assert part["verdict"] == "execution"
    assert part["execution"] == [{"name": "checkpoint.milestones", "a": [], "b": [5]}]
    assert (part["metrics"], part["losses"]) == ([], [])


def test_losses_stand_side_by_side_at_equal_tokens_only(done: Plan, planned: Planned) -> None:
    plan = planned("stages.pretrain.optimizer.weight_decay=0.2", "name=heavy")
    node = plan.graph.nodes["pretrain/1"]
    attempt = Attempt(job_of(plan, node).model_copy(update={"spec": spec_of(plan, "pretrain/1")}), plan.store)
    attempt.begin()
    trained(plan, attempt, scale=2.0)
    url, old = done.store.url, done.graph.nodes["pretrain/1"].path
    (part,) = read_json(
        "diff", f"{old}@step=8", f"pretrain/{node.fingerprint[:8]}", "--store", url, "--json"
    )["parts"]
    assert part["identity"] == [{"name": "optimizer.weight_decay", "a": 0.1, "b": 0.2}]
    assert part["metrics"] == [{"name": "loss", "a": 0.125, "b": 0.25}]
    assert [row for row in part["losses"] if row["name"] == "loss"] == [
        {"tokens": step * 128, "name": "loss", "a": 1 / step, "b": 2 / step} for step in range(1, 9)
    ]
    assert [row for row in part["losses"] if row["name"] != "loss"] == [
        {"tokens": 1024, "name": "validation/corpus/notes", "a": 1.0, "b": 2.0}
    ]


def test_published_scores_stand_beside_the_metrics_of_both_sides(done: Plan, recipe: Path) -> None:
    other = recipe.with_name("other.yaml")
    other.write_text(
        "extends: tiny.yaml\n"
        "stages: {evaluate: {reference: {perplexity: {value: 8, unit: metric, source: them}}}}\n"
    )
    store = done.store.url

    def published(a: str, b: str) -> list[dict[str, object]]:
        (part,) = read_json("diff", a, b, "--store", store, "--json")["parts"]
        return part["published"]

    expected = {
        "side": "A, B", "metric": "perplexity", "ours": 10.0, "published": 8.0, "difference": 2.0,
        "stderr": None, "stderr_of": "unknown", "source": "them",
    }  # fmt: skip
    assert published(f"{other}:evaluate", f"{other}:evaluate") == [expected]
    assert published(f"{recipe}:evaluate", f"{recipe}:evaluate") == []
    # a side that states no scores is compared with those of the other
    run = f"evaluate/{done.graph.nodes['evaluate'].fingerprint[:8]}"
    assert published(f"{other}:evaluate", run) == [expected]
    # and each with its own where both state them
    third = recipe.with_name("third.yaml")
    third.write_text(other.read_text().replace("value: 8", "value: 9, stderr: 0.5"))
    both = published(f"{other}:evaluate", f"{third}:evaluate")
    assert [(row["side"], row["published"]) for row in both] == [("A", 8.0), ("B", 9.0)]


def test_two_records_of_a_run_are_compared(done: Plan, planned: Planned) -> None:
    finish(planned("stages.export.tolerance=1e-3"), "export")
    first, _ = runs.stamps(done.store, "tiny")
    found = diff.compare(diff.side(f"tiny@{first}", done.store.url), diff.side("tiny", done.store.url))
    assert {one.name: one.verdict for one in found if one.verdict != "same"} == {"export": "differs"}
    (changed,) = [one for one in found if one.verdict == "differs"]
    assert [(change.name, change.b) for change in changed.identity] == [("tolerance", 0.001)]


def test_what_cannot_be_compared_is_a_message(done: Plan, recipe: Path) -> None:
    for arguments, message in (
        ((str(recipe), "nothing"), "'nothing' is no artifact"),
        ((f"{recipe}:pretrian", str(recipe)), "there is no stage 'pretrian'"),
        (("tiny@1999", "tiny"), "has no record that begins with '1999'"),
    ):
        result = invoke("diff", *arguments, "--store", done.store.url)
        assert (result.exit_code, message in result.output) == (2, True), result.output
