"""Comparing, tracing, cleaning and copying from the command line, over a store in which the tiny recipe has run."""

from __future__ import annotations

import hashlib
import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.cli.__main__ import app
from flows.planning.plan import Plan, make
from flows.provenance import diff, lineage
from flows.provenance.lookup import Found, find
from flows.provenance.picture import svg
from infra.store import Artifact, Attempt, Store, StoreError, runs
from infra.store.inputs import lock, recorded_files
from infra.store.maintenance.garbage import survey
from infra.store.reading import lineage as lineages
from specs.recipe import load
from tests.flows.conftest import finish, job_of
from tests.infra.sealed import sealed

Planned = Callable[..., Plan]
SIZES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def done(planned: Planned) -> Plan:
    """The tiny recipe, run: with files, metrics, a history, and what a manifest records of the source."""
    plan = planned("sources.notes.license=CC0-1.0", "sources.notes.language=en")
    finish(plan, *(name for name in plan.graph.nodes if name not in ("corpus/notes", "main", "pretrain/1", "export")))
    for name, work in (("corpus/notes", _corpus), ("main", _mixture), ("pretrain/1", _trained), ("export", _exported)):
        attempt = Attempt(job_of(plan, plan.graph.nodes[name]).model_copy(update={"spec": _spec(plan, name)}), plan.store)
        attempt.begin()
        work(plan, attempt)
    for listing_name, listing in plan.graph.listings.items():
        lock(plan.store, listing, plan.graph.digests[listing_name])
    return planned("sources.notes.license=CC0-1.0", "sources.notes.language=en")


def _spec(plan: Plan, name: str) -> dict[str, Any]:
    return plan.graph.nodes[name].part.model_dump(mode="json", by_alias=True)


def _corpus(plan: Plan, attempt: Attempt) -> None:
    counts = {"train": {"documents": 20, "tokens": 40_000}, "validation": {"documents": 4, "tokens": 900}}
    dropped = {"filters": ["length", "alphabetic"], "dropped": {"alphabetic": 1, "length": 5}}
    attempt.commit(metrics={"read": {"documents": 30}, "documents": 24, "tokens": 40_900} | dropped | counts)


def _mixture(plan: Plan, attempt: Attempt) -> None:
    source = {"path": plan.graph.nodes["corpus/notes"].path, "weight": 1, "tokens": 40_000, "documents": 20}
    attempt.write_json("recipe.json", {"sources": [source]})
    attempt.commit(metrics={})


def _trained(plan: Plan, attempt: Attempt, scale: float = 1.0) -> None:
    for step in range(1, 9):
        attempt.add_metrics({"step": step, "tokens": step * 128, "loss": scale / step})
    attempt.add_metrics({"step": 8, "validation": {"corpus/notes": scale}})
    attempt.store.write_once(f"{attempt.folder(Attempt.checkpoint_folder(8))}/weights", b"weights")
    attempt.commit_checkpoint(8, {"tokens": 1024}, files=sealed(attempt, 8))
    attempt.commit(metrics={"loss": scale / 8}, step=8)


def _exported(plan: Plan, attempt: Attempt) -> None:
    for name, content in SIZES.items():
        attempt.write_bytes(name, content)
    attempt.commit(metrics={"logit_difference": 1e-6})


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def read_json(*arguments: str) -> Any:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# diff


def test_two_recipes_are_compared_part_by_part_with_identity_apart_from_execution(done: Plan, recipe: Path) -> None:
    other = recipe.with_name("other.yaml")
    other.write_text(
        "extends: tiny.yaml\nstages: {cooldown: {optimizer: {lr: 2e-4}, micro_batch_size: 2}, pretrain: {micro_batch_size: 1}}\n"
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
    text = invoke("diff", str(recipe), str(other), "--store", done.store.url).output
    assert "same 4 of 10 parts" in text
    alike = "3 parts same fingerprint: the same result, run in another way: pretrain/1, pretrain/2, pretrain/3"
    assert alike in " ".join(text.split())


def test_two_stages_of_one_recipe_are_compared_whatever_their_names(done: Plan, recipe: Path) -> None:
    (part,) = read_json("diff", f"{recipe}:pretrain/2", ":cooldown", "--store", done.store.url, "--json")["parts"]
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
        ("pretrain@step=2", [("pretrain/1", "other/1"), ("pretrain/2", "other/2"), ("pretrain/3", "other/3")]),  # inside of one
    ],
)
def test_a_branch_is_compared_with_what_it_branches_off(
    planned: Planned, recipe: Path, store: Store, point: str, pairs: list[tuple[str, str]]
) -> None:
    assert invoke("branch", str(recipe), point, "--name", "other", "--store", store.url).exit_code == 0
    other = str(recipe.with_name("other.yaml"))
    stages = read_json("diff", f"{recipe}:pretrain", f"{other}:other", "--store", store.url, "--json")["parts"]
    assert [part["name"] for part in stages if part["verdict"] == "differs"] == [f"{one} | {two}" for one, two in pairs]
    swapped = read_json("diff", f"{other}:other", f"{recipe}:pretrain", "--store", store.url, "--json")["parts"]
    assert [part["name"] for part in swapped if part["verdict"] == "differs"] == [f"{two} | {one}" for one, two in pairs]
    whole = read_json("diff", str(recipe), other, "--store", store.url, "--json")["parts"]
    assert {f"{one} | {two}" for one, two in pairs} <= {part["name"] for part in whole}


def test_of_the_same_work_only_what_was_stated_otherwise_is_told(done: Plan, planned: Planned, recipe: Path) -> None:
    other = recipe.with_name("other.yaml")
    more = "{kind: evaluate, from: pretrain@step=8, sources: [corpus/notes]}"  # makes step 8 a milestone of `pretrain/1`
    other.write_text(f"extends: tiny.yaml\nstages: {{more: {more}, pretrain: {{checkpoint: {{milestones: [5]}}}}}}\n")
    (part,) = read_json("diff", f"{recipe}:pretrain/1", f"{other}:pretrain/1", "--store", done.store.url, "--json")["parts"]
    assert part["verdict"] == "execution"
    assert part["execution"] == [{"name": "checkpoint.milestones", "a": [], "b": [5]}]
    assert (part["metrics"], part["losses"]) == ([], [])


def test_losses_stand_side_by_side_at_equal_tokens_only(done: Plan, planned: Planned) -> None:
    plan = planned("stages.pretrain.optimizer.weight_decay=0.2", "name=heavy")
    node = plan.graph.nodes["pretrain/1"]
    attempt = Attempt(job_of(plan, node).model_copy(update={"spec": _spec(plan, "pretrain/1")}), plan.store)
    attempt.begin()
    _trained(plan, attempt, scale=2.0)
    url, old = done.store.url, done.graph.nodes["pretrain/1"].path
    (part,) = read_json("diff", f"{old}@step=8", f"pretrain/{node.fingerprint[:8]}", "--store", url, "--json")["parts"]
    assert part["identity"] == [{"name": "optimizer.weight_decay", "a": 0.1, "b": 0.2}]
    assert part["metrics"] == [{"name": "loss", "a": 0.125, "b": 0.25}]
    assert [row for row in part["losses"] if row["name"] == "loss"] == [
        {"tokens": step * 128, "name": "loss", "a": 1 / step, "b": 2 / step} for step in range(1, 9)
    ]
    assert [row for row in part["losses"] if row["name"] != "loss"] == [
        {"tokens": 1024, "name": "validation/corpus/notes", "a": 1.0, "b": 2.0}
    ]


def test_a_part_begins_where_its_lineage_had_come_to(store: Store) -> None:
    def part(letter: str, spec: dict[str, int], *parents: tuple[str, int]) -> str:
        role = "parent" if len(parents) == 1 else "checkpoint:"
        inputs = {
            f"{role}{index if len(parents) > 1 else ''}": {"kind": "pretrain", "fingerprint": path.split("/")[1], "step": step}
            for index, (path, step) in enumerate(parents)
        }
        identity = {"kind": "pretrain", "version": 1, "fingerprint": letter * 32, "name": letter, "spec": spec, "inputs": inputs}
        store.write_once(f"pretrain/{letter * 32}/identity.json", json.dumps(identity).encode())
        return f"pretrain/{letter * 32}"

    first = part("a", {"global_batch_size": 4, "sequence_length": 32})
    second = part("b", {"global_batch_size": 8, "sequence_length": 32, "start_step": 20, "start_tokens": 2560}, (first, 20))
    branched = part("c", {"global_batch_size": 8, "sequence_length": 32}, (first, 20))
    merged = part("d", {}, (second, 30), (branched, 5))
    last = part("e", {"global_batch_size": 1, "sequence_length": 64}, (merged, 1))
    before = {path: lineages.tokens_before(store, path) for path in (first, second, branched, merged, last)}
    assert list(before.values()) == [0, 20 * 128, 20 * 128, 20 * 128 + 10 * 256, 20 * 128 + 10 * 256]


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


# lineage


def auditable(found: lineage.Lineage) -> None:
    (row,) = lineage.source_rows(found)
    assert (row["name"], row["license"], row["language"], row["tokens_held"]) == ("notes", "CC0-1.0", "en", 40_000)
    assert row["tokens_trained_on"] == 8 * 128 + 6 * 8 * 32  # pretrain/1 and cooldown draw from `main`, whose recipe is stored
    text = svg(found, "a <title>")
    root = ElementTree.fromstring(text)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <title>", "licence: CC0-1.0", "corpus/notes", "pretrain/1", "export"} <= set(texts)
    assert "<script" not in text and "href" not in text


def test_a_lineage_leads_from_the_export_to_the_last_source_file(done: Plan, recipe: Path, tmp_path: Path) -> None:
    url = done.store.url
    facts = ["--set", "sources.notes.license=CC0-1.0", "--set", "sources.notes.language=en"]
    auditable(lineage.of_plan(done, ["export"]))
    text = invoke("lineage", str(recipe), "export", "--store", url, *facts, "--files", "--picture", str(tmp_path / "l.svg")).output
    assert "30 read, 20 documents with 40,000 tokens to train on, 4 held out" in text
    assert "filters dropped: length 5, alphabetic 1" in text
    assert (tmp_path / "l.svg").exists()
    for path in sorted((tmp_path / "documents").glob("*.txt")):
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.stat().st_size:>12,}  {path.name}" in text
    document = read_json("lineage", str(recipe), "export", "--store", url, *facts, "--files", "--json")
    corpus = document["inputs"]["checkpoint"]["inputs"]["mixture"]["inputs"]["source:0"]
    assert corpus["metrics"]["dropped"] == {"length": 5, "alphabetic": 1}
    documents = corpus["inputs"]["documents"]
    assert documents["source"]["license"] == "CC0-1.0" and len(documents["files"]) == 30


def test_the_store_alone_is_enough(done: Plan, tmp_path: Path) -> None:
    export = done.graph.nodes["export"]
    folder = tmp_path / "elsewhere"
    shutil.copytree(Path(done.store.full(export.path)) / "attempts" / "attempt-export", folder)
    shutil.rmtree(tmp_path / "documents")
    for name in (export.path, export.fingerprint[:8], "tiny", "tiny:export", str(folder)):
        assert find(done.store, name) == [Found(export.path, None)], name
    auditable(lineage.of_store(done.store, export.path, None))
    document = read_json("lineage", str(folder), "--store", done.store.url, "--json")
    assert (document["name"], document["fingerprint"]) == ("export", export.fingerprint)
    (folder / "model.safetensors").write_bytes(b"Weights")
    result = invoke("lineage", str(folder), "--store", done.store.url)
    assert result.exit_code == 2 and "no export in the store" in result.output


def test_a_name_that_fits_several_artifacts_is_refused_with_all_of_them(store: Store) -> None:
    for kind, fingerprint in (("corpus", "a" * 32), ("corpus", "a" * 31 + "b"), ("export", "a" * 32)):
        store.write_once(f"{kind}/{fingerprint}/identity.json", b"{}")
    with pytest.raises(StoreError, match=f"fits corpus/{'a' * 32}, corpus/{'a' * 31}b, export/{'a' * 32}; write more of it"):
        find(store, "aaaaaa")
    assert find(store, "export/aaaaaa") == [Found(f"export/{'a' * 32}", None)]


def test_the_record_of_source_files_makes_the_digest_or_is_refused(done: Plan) -> None:
    digest = done.graph.digests["notes"]
    rows = recorded_files(done.store, digest)
    assert rows is not None and len(rows) == 30
    path = f"inputs/{digest}.files.jsonl"
    data = done.store.read_bytes(path)
    done.store.fs.pipe_file(done.store.full(path), data.replace(b"note-00", b"note-99"))
    with pytest.raises(StoreError, match=f"its files do not make the digest {digest}"):
        recorded_files(done.store, digest)
    assert recorded_files(done.store, "0" * 32) is None


# runs, forget, gc


def test_gc_shows_and_removes_nothing_until_it_is_told_to(done: Plan, planned: Planned) -> None:
    url = done.store.url
    heavy = planned("stages.cooldown.optimizer.lr=2e-4", "name=heavy")
    finish(heavy, "cooldown", "evaluate", "export")
    assert [row["name"] for row in read_json("runs", "--store", url, "--json")["runs"]] == ["heavy", "tiny"]
    assert invoke("gc", "--store", url, "--yes").output.startswith("every file of")  # all is younger than a day
    assert invoke("forget", "heavy", "--store", url).exit_code == 0
    shown = invoke("gc", "--store", url, "--grace", "0s")
    assert "no run reaches it" in shown.output and "nothing is removed without --yes" in shown.output
    paths = {item["path"] for item in read_json("gc", "--store", url, "--grace", "0s", "--json")["items"]}
    assert paths == {heavy.graph.nodes[name].path for name in ("cooldown", "evaluate", "export")}
    assert Artifact(done.store, heavy.graph.nodes["export"].path).complete
    removed = invoke("gc", "--store", url, "--grace", "0s", "--yes")
    assert removed.exit_code == 0 and "of 3 items removed" in removed.output
    assert not done.store.names(heavy.graph.nodes["export"].path)
    assert {step.action for step in planned().steps.values()} == {"reuse"}
    assert survey(done.store, grace=0.0).items == []


def test_a_finished_run_gets_a_name_of_its_own_and_keeps_it_when_the_recipe_moves_on(done: Plan, planned: Planned, recipe: Path) -> None:
    url = done.store.url
    for _ in range(2):
        assert "All 10 parts of keep are finished" in invoke("run", str(recipe), "--name", "keep", "--store", url).output
    assert [(row["name"], row["records"], row["finished"]) for row in read_json("runs", "--store", url, "--json")["runs"]] == [
        ("keep", 1, 10),
        ("tiny", 1, 10),
    ]
    finish(planned("stages.export.tolerance=1e-3"), "export")
    assert survey(done.store, grace=0.0).items == []
    runs.forget(done.store, "keep")
    assert [item.path for item in survey(done.store, grace=0.0).items] == [done.graph.nodes["export"].path]


def test_what_is_proposed_after_a_run_is_about_the_same_store_and_the_same_recipe(done: Plan, recipe: Path) -> None:
    result = invoke("run", str(recipe), "--store", done.store.url, "--set", "stages.pretrain.checkpoint={interval: 7}", "--name", "own")
    options = f"--store {done.store.url} --set 'stages.pretrain.checkpoint={{interval: 7}}' --set name=own"
    proposed = [line.partition("apertus ")[2] or line for line in result.output.partition("Next:\n")[2].splitlines()]
    assert [line[line.index(command) :] for line, command in zip(proposed, ("status", "lineage", "plan"), strict=True)] == [
        f"status {recipe} {options}",
        f"lineage {recipe} export {options}",
        f"plan {recipe} {options} --set stages.cooldown.optimizer.lr=0.005",
    ]


def test_what_is_protected_after_it_has_finished_is_noted_by_the_next_run(done: Plan, recipe: Path) -> None:
    url, protect = done.store.url, ["--set", "stages.cooldown.protect=true"]
    assert invoke("run", str(recipe), "--store", url, *protect).exit_code == 0
    done.store.remove(done.graph.nodes["cooldown"].path)
    refused = invoke("plan", str(recipe), "--store", url, *protect)
    assert refused.exit_code == 2 and "'cooldown' is protected and had finished" in refused.output


def test_a_store_that_is_not_there_is_a_message(tmp_path: Path) -> None:
    for arguments in (["runs"], ["gc"], ["forget", "x"]):
        result = invoke(*arguments, "--store", str(tmp_path / "nothing"))
        assert result.exit_code == 2 and "there is no store at" in result.output
    assert not (tmp_path / "nothing").exists()


def test_a_grace_period_that_is_none_is_a_message(store: Store) -> None:
    result = invoke("gc", "--store", store.url, "--grace", "soon")
    assert result.exit_code == 2 and "'soon' is not a duration" in result.output


# cp


@pytest.mark.parametrize("by_name", [True, False])
def test_a_copied_run_is_reused_everywhere_and_goes_on_in_its_new_place(done: Plan, recipe: Path, tmp_path: Path, by_name: bool) -> None:
    target = str(tmp_path / "target")
    copied = invoke("cp", "tiny" if by_name else str(recipe), target, "--store", done.store.url)
    assert copied.exit_code == 0, copied.output
    there = Store.open(target)
    plan = make(load(recipe), there)
    assert {step.action for step in plan.steps.values()} == {"reuse"}
    longer = make(load(recipe, ["stages.pretrain.budget=30 steps"]), there).steps["pretrain/3"]
    assert (longer.action, longer.resume_step) == ("resume", 16)
    assert survey(there, grace=0.0).items == []  # it is a named run of the target
    again = invoke("cp", "tiny" if by_name else str(recipe), target, "--store", done.store.url)
    assert " 0 files " in again.output
    assert len(runs.stamps(there, "tiny")) == 1


def test_some_stages_are_copied_with_what_they_were_made_from(done: Plan, recipe: Path, tmp_path: Path) -> None:
    for what in ("tiny", str(recipe)):
        target = str(tmp_path / f"target-{Path(what).stem}-{len(what)}")
        assert invoke("cp", what, target, "--stages", "pretrain", "--store", done.store.url).exit_code == 0
        actions = {name: step.action for name, step in make(load(recipe), Store.open(target)).steps.items()}
        assert actions == dict.fromkeys(
            ["tokenizer", "corpus/notes", "main", "second", "pretrain/1", "pretrain/2", "pretrain/3"], "reuse"
        ) | dict.fromkeys(["cooldown", "evaluate", "export"], "run")


@pytest.mark.parametrize("by_name", [True, False])
def test_a_copy_of_some_stages_leaves_a_run_of_the_target_whole(done: Plan, recipe: Path, tmp_path: Path, by_name: bool) -> None:
    what, target = "tiny" if by_name else str(recipe), str(tmp_path / "target")
    assert invoke("cp", what, target, "--store", done.store.url).exit_code == 0
    there = Store.open(target)
    before = runs.last(there, "tiny").parts
    shorter = () if by_name else ("--set", "stages.pretrain.budget=14 steps")  # an earlier step of what the target has
    assert invoke("cp", what, target, "--stages", "pretrain", "--store", done.store.url, *shorter).exit_code == 0
    assert (runs.last(there, "tiny").parts, len(runs.stamps(there, "tiny"))) == (before, 1)
    assert survey(there, grace=0.0).items == []


def test_copies_of_stages_one_after_the_other_add_up(done: Plan, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    for stage in ("second", "cooldown", "tokenizer"):
        assert invoke("cp", "tiny", target, "--stages", stage, "--store", done.store.url).exit_code == 0
    there = Store.open(target)
    assert set(runs.last(there, "tiny").parts) == {"second", "cooldown", "tokenizer"}
    assert {item.why for item in survey(there, grace=0.0).items} == set()


def test_a_copy_that_cannot_be_is_a_message(done: Plan, recipe: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("nothing", str(tmp_path / "t")), "there is no run 'nothing'"),
        (("tiny", done.store.url), "source and target are the same store"),
        (("tiny", str(tmp_path / "t"), "--stages", "pretrian"), "run 'tiny' has no stage 'pretrian'"),
        ((str(recipe), str(tmp_path / "t"), "--stages", "pretrian"), "--stages: there is no stage 'pretrian'"),
    ):
        result = invoke("cp", *arguments, "--store", done.store.url)
        assert (result.exit_code, message in result.output) == (2, True), result.output


def test_branch_from_the_command_line_writes_the_file_and_says_what_is_shared(done: Plan, recipe: Path) -> None:
    result = invoke("branch", str(recipe), "pretrain@step=12", "--name", "other", "--store", done.store.url)
    assert result.exit_code == 0, result.output
    assert "7 parts are shared with" in result.output and "4 are new: other, cooldown, evaluate, export" in result.output
    assert recipe.with_name("other.yaml").exists()
    assert "stands already in" in invoke("branch", str(recipe), "pretrain@step=12", "--name", "other", "--store", done.store.url).output


def test_a_branch_is_written_where_there_is_a_folder_and_says_how_it_was_made(done: Plan, recipe: Path, tmp_path: Path) -> None:
    target, nowhere = tmp_path / "there.yaml", tmp_path / "none" / "x.yaml"
    options = ("branch", str(recipe), "pretrain@step=12", "--name", "other", "--store", done.store.url, "--output")
    result = invoke(*options, str(nowhere))
    assert (result.exit_code, f"there is no folder '{nowhere.parent}'" in result.output.replace("\n", "")) == (2, True), result.output
    assert invoke(*options, str(target)).exit_code == 0
    assert f"#   apertus branch {recipe} pretrain@step=12 --name other --output {target}\n" in target.read_text()


# Metrics


def test_metrics_are_one_table_keyed_by_run_stage_attempt_and_step(done: Plan, recipe: Path, tmp_path: Path) -> None:
    target = tmp_path / "metrics.parquet"
    result = invoke("metrics", str(recipe), "--store", done.store.url, "--output", str(target))
    assert result.exit_code == 0, result.output
    rows = pq.read_table(target).to_pylist()
    assert {(row["run"], row["stage"], row["part"]) for row in rows} == {(done.pipeline.name, "pretrain", "pretrain/1")}
    assert len({row["attempt"] for row in rows}) == 1
    assert [(row["step"], row["loss"]) for row in rows[:-1]] == [(step, 1 / step) for step in range(1, 9)]
    assert (rows[-1]["step"], rows[-1]["validation/corpus/notes"]) == (8, 1.0)
    assert f"{len(rows):,} rows are in" in result.output
    assert invoke("metrics", str(recipe), "pretrian", "--store", done.store.url).exit_code == 2


def test_a_table_of_no_rows_is_refused_with_the_reason(done: Plan, recipe: Path, tmp_path: Path) -> None:
    target = tmp_path / "metrics.parquet"
    for store, stages, message in (
        (str(tmp_path / "empty"), [], "pretrain, cooldown: no training is stored in"),
        (done.store.url, ["cooldown", "main"], "cooldown: no training is stored in"),
        (done.store.url, ["main"], "only stages that train have rows. Fix: name some of pretrain, cooldown."),
    ):
        result = invoke("metrics", str(recipe), *stages, "--store", store, "--output", str(target))
        assert (result.exit_code, message in result.output) == (2, True), result.output
    assert not target.exists()


def test_a_stage_of_a_stored_run_is_not_looked_for_in_a_file(done: Plan) -> None:
    result = invoke("lineage", "tiny", "export", "--store", done.store.url)
    assert result.exit_code == 2
    assert "for a run, name a part: tiny:export." in result.output
    assert invoke("lineage", "tiny:export", "--store", done.store.url).exit_code == 0
