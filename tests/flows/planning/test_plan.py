"""What reruns and what does not. The rules that every user relies on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store, StoreError
from infra.store.documents import to_json
from infra.store.inputs import lock
from infra.store.reading.artifact import quarantine
from specs.errors import SpecError
from specs.locations import RULE
from specs.recipe import load
from tests.flows.conftest import finish
from tests.recipes import RECIPE, line_of, write_documents, write_recipe

Planned = Callable[..., Plan]
ROOT = Path(__file__).resolve().parents[3]


def actions(plan: Plan) -> dict[str, str]:
    return {name: step.action for name, step in plan.steps.items()}


def to_do(plan: Plan) -> list[str]:
    return [name for name, step in plan.steps.items() if step.action != "reuse"]


def test_in_an_empty_store_everything_runs(planned: Planned) -> None:
    plan = planned()
    parts = [
        "tokenizer",
        "corpus/notes",
        "main",
        "second",
        "pretrain/1",
        "pretrain/2",
        "pretrain/3",
        "cooldown",
        "evaluate",
        "export",
    ]
    assert actions(plan) == dict.fromkeys(parts, "run")


def test_when_everything_is_stored_nothing_runs(planned: Planned) -> None:
    finish(planned())
    assert to_do(planned()) == []


@pytest.mark.parametrize(
    "override",
    [
        "launch.processes=2",
        "launch.threads=1",
        "stages.pretrain.micro_batch_size=2",
        "stages.pretrain.checkpoint.interval=3",
        "stages.pretrain.validation.samples=1",
        "stages.pretrain.activation_checkpointing=full",
        "stages.pretrain.launch.processes=2",
        "stages.corpus.files_per_task=1",
        "stages.evaluate.gates=[]",
        "store=somewhere-else",
        "concurrency=3",
        "sources.notes.license=CC0-1.0",
        "stages.main.max_repetition=50",
        "name=other",
    ],
)
def test_resources_places_and_bounds_do_not_change_a_fingerprint(planned: Planned, override: str) -> None:
    finish(planned())
    assert to_do(planned(override)) == []


def test_renaming_stages_reruns_nothing(planned: Planned, tmp_path: Path, store: Store) -> None:
    finish(planned())
    text = RECIPE
    for old, new in (
        ("pretrain", "base"),
        ("cooldown", "annealed"),
        ("main", "first"),
        ("corpus", "texts"),
        ("notes", "pages"),
    ):
        text = text.replace(old, new)
    text = (
        text.replace("kind: base", "kind: pretrain")
        .replace("kind: annealed", "kind: cooldown")
        .replace("kind: texts", "kind: corpus")
    )
    renamed = make(load(write_recipe(tmp_path, text)), store)
    assert "base/1" in renamed.steps
    assert to_do(renamed) == []


def test_moving_store_and_documents_reruns_nothing(planned: Planned, tmp_path: Path) -> None:
    finish(planned())
    (tmp_path / "moved").mkdir()
    shutil.move(tmp_path / "store", tmp_path / "moved" / "store")
    shutil.move(tmp_path / "documents", tmp_path / "moved" / "documents")
    moved = make(load(write_recipe(tmp_path / "moved")), Store.open(str(tmp_path / "moved" / "store")))
    assert to_do(moved) == []


def test_an_edited_document_reruns_from_there(planned: Planned, tmp_path: Path) -> None:
    finish(planned())
    (tmp_path / "documents" / "note-03.txt").write_text("something else entirely")
    plan = planned()
    assert len(to_do(plan)) == len(plan.steps)
    assert "documents of notes changed" in plan.steps["tokenizer"].reason


def test_a_longer_budget_continues_the_last_segment(planned: Planned) -> None:
    finish(planned())
    plan = planned("stages.pretrain.budget=30 steps")
    assert to_do(plan) == ["pretrain/3", "cooldown", "evaluate", "export"]
    step = plan.steps["pretrain/3"]
    assert (step.action, step.resume_step) == ("resume", 16)
    assert step.reason == "at step 16 of 30; the budget grew: it ended at step 16 before"
    # 14 steps of 8 sequences and, in `cooldown`, 6 of 8, of 32 tokens each; what is done of `pretrain/3` is 4
    # of its 18 steps
    left = plan.to_json()["totals"]["to_do"]
    nodes = plan.graph.nodes
    assert (left["steps"], left["tokens"]) == (14 + 6, (14 + 6) * 8 * 32)
    training = nodes["pretrain/3"].flops * 14 // 18 + nodes["cooldown"].flops
    assert left["flops"] == training + plan.steps["evaluate"].flops


def test_a_child_at_a_step_does_not_depend_on_where_its_parent_ends(planned: Planned) -> None:
    overrides = ["stages.cooldown.from=pretrain@step=10"]
    finish(
        planned(*overrides),
        "tokenizer",
        "corpus/notes",
        "main",
        "second",
        "pretrain/1",
        "pretrain/3",
        "cooldown",
        "evaluate",
        "export",
    )
    finish(planned(*overrides), "pretrain/2", until=10)
    assert to_do(planned(*overrides, "stages.pretrain.budget=40 steps")) == ["pretrain/2", "pretrain/3"]


def test_an_interrupted_part_resumes_at_its_last_checkpoint(planned: Planned) -> None:
    finish(planned(), "tokenizer", "corpus/notes", "main", "second", "pretrain/1")
    finish(planned(), "pretrain/2", until=10)
    step = planned().steps["pretrain/2"]
    assert (step.action, step.resume_step) == ("resume", 10)
    assert "it was interrupted" in step.reason


def test_part_without_commits_is_reported(planned: Planned, store: Store) -> None:
    node = planned().graph.nodes["tokenizer"]
    store.write_once(f"{node.path}/identity.json", b"{}")
    assert planned().steps["tokenizer"].reason == "it was interrupted before anything was committed"


def test_withdrawn_part_is_reported(planned: Planned, store: Store) -> None:
    finish(planned(), "tokenizer")
    quarantine(store, [f"{planned().graph.nodes['tokenizer'].path}/manifest.json"])
    assert planned().steps["tokenizer"].reason == "it was damaged, and is withdrawn"


def change_a_digit(store: Store, path: str) -> None:
    """Adds one to the last digit of a document, which stays valid JSON."""
    text = store.read_bytes(path).decode()
    at = max(index for index, sign in enumerate(text) if sign.isdigit())
    Path(store.full(path)).write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


def test_a_finished_part_with_a_changed_manifest_is_neither_reused_nor_rerun(
    planned: Planned, store: Store
) -> None:
    finish(planned())
    for node in planned().graph.nodes.values():
        path = node.artifact(store).manifest_path
        sound = store.read_bytes(path)
        change_a_digit(store, path)
        with pytest.raises(StoreError, match=rf"'{path}' .* does not match its checksum.*verify --all --fix"):
            planned()
        Path(store.full(path)).write_bytes(sound)
    assert to_do(planned()) == []


def test_documents_whose_recorded_digest_has_changed_are_not_taken_for_others(
    planned: Planned, store: Store
) -> None:
    plan = planned()
    for name, listing in plan.graph.listings.items():
        lock(store, listing, plan.graph.digests[name])
    finish(plan)
    [path] = [f"inputs/{name}" for name in store.names("inputs") if name.endswith(".json")]
    change_a_digit(store, path)
    with pytest.raises(StoreError, match=rf"'{path}' .* does not match its checksum"):
        planned()


def test_a_changed_record_of_the_last_run_is_named_and_a_protected_stage_waits(
    planned: Planned, store: Store
) -> None:
    finish(planned())
    [record] = store.names("runs/tiny")
    change_a_digit(store, f"runs/tiny/{record}")
    other = "stages.pretrain.optimizer.eps=1e-6"
    [note] = [note for note in planned(other).graph.notes if record in note]
    assert note.startswith("what changed since the last run is not known: 'runs/tiny/")
    refused = rf"'pretrain/1' is protected, and it is not known whether it had finished: 'runs/tiny/{record}'"
    with pytest.raises(SpecError, match=refused):
        planned("stages.pretrain.protect=true", other)


def test_documents_without_a_checksum_are_planned_with_a_note(planned: Planned, store: Store) -> None:
    finish(planned())
    assert not [note for note in planned().graph.notes if "checksum" in note]
    path = f"{planned().graph.nodes['tokenizer'].path}/manifest.json"
    store.replace(path, to_json(store.read_json(path)))
    store.without_checksum.clear()
    plan = planned()
    assert to_do(plan) == []
    unnoticed = "stored without a checksum, so that a change would not be noticed"
    assert plan.graph.notes[-1] == f"{unnoticed}: {path}"


def test_a_parent_step_that_was_not_kept_is_an_error_that_lists_the_kept_ones(planned: Planned) -> None:
    finish(planned())
    with pytest.raises(SpecError, match=r"step 9 of 'pretrain/2' was not kept; kept are 8, 12, 16"):
        planned("stages.cooldown.from=pretrain@step=9")


def test_steps_that_children_start_from_are_kept(planned: Planned) -> None:
    plan = planned("stages.cooldown.from=pretrain@step=9")
    assert 9 in plan.graph.nodes["pretrain/2"].part.checkpoint.milestones  # type: ignore[attr-defined]  # a segment


def test_a_protected_stage_is_never_rerun_by_a_change(planned: Planned) -> None:
    finish(planned())
    assert to_do(planned("stages.pretrain.protect=true")) == []
    with pytest.raises(
        SpecError,
        match=(
            r"stages\.pretrain\.protect: 'pretrain/1' is protected and would run again: optimizer\.eps: 1e-08"
            r" -> 1e-06"
        ),
    ):
        planned("stages.pretrain.protect=true", "stages.pretrain.optimizer.eps=1e-6")


def test_a_gate_that_is_not_met_shows_in_the_plan_and_reruns_nothing(planned: Planned) -> None:
    finish(planned())
    plan = planned("stages.evaluate.gates=[{metric: perplexity, max: 5}]")
    assert to_do(plan) == []
    override = "--set stages.evaluate.gates=[{metric: perplexity, max: 5}]"
    failure = f"gate on perplexity: 10 is above the allowed 5 ({override})"
    assert plan.steps["evaluate"].gate_failures == (failure,)
    assert [step.node.name for step in plan.pending] == ["evaluate"]


def test_a_gate_that_is_not_met_names_its_line(planned: Planned, recipe: Path) -> None:
    finish(planned(), metrics={"perplexity": 2000.0})
    place = f"{recipe}:{line_of(recipe, 'gates:')}"
    (failure,) = planned().steps["evaluate"].gate_failures
    assert failure == f"gate on perplexity: 2000 is above the allowed 1000 ({place})"


def test_a_missing_source_is_an_error_with_its_place(planned: Planned, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "documents")
    with pytest.raises(SpecError, match=r"tiny\.yaml:3: sources\.notes: there is nothing at"):
        planned()


@pytest.mark.parametrize(
    ("stated", "changed"),
    [
        ('url: "{documents}"', "url: missing"),
        ("sources: [notes], vocab_size: 512, bytes_per_source: 50_000", "path: missing"),
        ("from: cooldown, after", 'from: "hf:./missing", after'),
        ("holdout: 0.2", "filters: [{{filter: language, model: missing, languages: [de]}}]"),
        ("gates:", "harness: {{include: missing, suites: {{own: {{tasks: [own]}}}}}}\n    gates:"),
    ],
)
def test_a_missing_path_is_shown_resolved_and_with_the_rule(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, stated: str, changed: str
) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace(stated, changed))
    monkeypatch.chdir(write_documents(tmp_path / "elsewhere"))
    with pytest.raises(SpecError, match=rf"{tmp_path}/missing.*{RULE}"):
        make(load(recipe), store)


def test_a_recipe_has_the_same_fingerprints_wherever_it_and_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprints(folder: Path, current: Path) -> dict[str, str]:
        write_recipe(folder)
        (folder / "tiny.yaml").write_text(RECIPE.format(documents="documents"))
        monkeypatch.chdir(current)
        store = Store.open(str(folder / "store"))
        nodes = make(load(folder / "tiny.yaml"), store).graph.nodes
        return {name: node.fingerprint for name, node in nodes.items()}

    here = fingerprints(tmp_path / "one", tmp_path)
    assert fingerprints(tmp_path / "deeper" / "two", tmp_path / "one") == here
    assert fingerprints(tmp_path / "one", tmp_path / "one" / "documents") == here


def test_data_of_another_tokenizer_are_refused_for_a_model(planned: Planned) -> None:
    other = [
        "stages.evaluate.sources=[pages/notes]",
        "stages.cooldown.mixture=foreign",
        "stages.pretrain.model.vocab_size=1024",
    ]
    text = (
        RECIPE + "  letters: {{kind: tokenizer, sources: [notes], vocab_size: 1024}}\n"
        "  pages: {{kind: corpus, tokenizer: letters, sources: {{notes: {{holdout: 0.2}}}}}}\n"
        "  foreign: {{kind: mixture, weights: {{pages/notes: 1}}, max_repetition: 100}}\n"
    )
    path = write_recipe(Path(planned().store.root).parent, text)
    with pytest.raises(SpecError) as caught:
        make(load(path, other), planned().store)
    text = str(caught.value)
    assert (
        "stages.cooldown.mixture: 'foreign' is tokenised by 'letters', the model was trained with 'tokenizer'"
        in text
    )
    # the cooldown is what is wrong
    assert "stages.evaluate.sources[0]: 'pages/notes' is tokenised by 'letters'" not in text
    with pytest.raises(
        SpecError, match=r"stages\.evaluate\.sources\[0\]: 'pages/notes' is tokenised by 'letters'"
    ):
        make(load(path, [other[0], other[2]]), planned().store)


def test_json_has_one_object_per_stage_and_totals(planned: Planned) -> None:
    finish(planned(), "tokenizer")
    document = json.loads(json.dumps(planned().to_json()))
    stages = {stage["name"]: stage for stage in document["stages"]}
    assert list(stages) == [
        "tokenizer",
        "corpus",
        "main",
        "second",
        "pretrain",
        "cooldown",
        "evaluate",
        "export",
    ]
    for stage in stages.values():
        assert {
            "name",
            "kind",
            "action",
            "reason",
            "fingerprint",
            "path",
            "tokens",
            "steps",
            "flops",
        } <= stage.keys()
    assert stages["tokenizer"]["action"] == "reuse"
    assert stages["tokenizer"]["path"].startswith("tokenizer/")
    assert stages["pretrain"]["path"] is None
    assert (stages["pretrain"]["steps"], stages["pretrain"]["tokens"]) == (16, (12 * 4 + 4 * 8) * 32)
    assert [part["name"] for part in stages["pretrain"]["parts"]] == [
        "pretrain/1",
        "pretrain/2",
        "pretrain/3",
    ]
    assert document["totals"]["steps"] == 22
    assert (
        document["totals"]["parameters"]
        == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 16 + 2 * 32 * 64 + 2 + 64) + 2 * 512 * 32 + 32
    )


def test_planning_needs_neither_torch_nor_prefect(recipe: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from flows.cli.__main__ import app; from typer.testing import CliRunner; "
        f"result = CliRunner().invoke(app, ['plan', {str(recipe)!r}, '--store', {str(tmp_path / 's')!r}]); "
        "assert result.exit_code == 0, result.output; "
        "assert not {'torch', 'prefect', 'numpy', 'transformers'} & set(sys.modules); print('light')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.endswith("light\n"), done.stdout + done.stderr


def test_planning_writes_nothing(planned: Planned, store: Store) -> None:
    before = sorted(store.fs.find(store.root))
    planned()
    assert sorted(store.fs.find(store.root)) == before
