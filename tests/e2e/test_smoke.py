"""The whole pipeline through the Prefect flow: to its end, killed, interrupted, resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from flows.planning.plan import Plan, make
from infra.store import Artifact, Store
from specs.recipe import load
from tests.e2e.conftest import ROOT, SMOKE, Run, cooling_run, ended_as_interrupted, group_twice


def plan_of(store: Path | str, *overrides: str) -> Plan:
    return make(load(ROOT / SMOKE, overrides), Store.open(str(store)))


def artifact(plan: Plan, name: str) -> Artifact:
    node = plan.graph.nodes[name]
    return Artifact(plan.store, node.path, node.end_step)


def result(store: Path | str) -> dict[str, Any]:
    """What must not depend on interruptions: weights as exported, the loss of every training step,
    evaluation."""
    plan = plan_of(store)
    rows = {
        name: [
            (row["step"], row["loss"], row["lr"]) for row in artifact(plan, name).history() if "loss" in row
        ]
        for name in ("pretrain/1", "pretrain/2", "cooldown")
    }
    files = artifact(plan, "export").manifest.files
    weights = {name: record.sha256 for name, record in files.items() if name.endswith(".safetensors")}
    return {"weights": weights, "rows": rows, "evaluation": artifact(plan, "evaluate").manifest.metrics}


def test_every_stage_finishes_and_accounts_for_its_time(finished: Path) -> None:
    plan = plan_of(finished)
    assert plan.pending == []
    for step in plan.steps.values():
        manifest = Artifact(plan.store, step.node.path, step.node.end_step).manifest
        assert manifest.seconds is not None
        assert manifest.seconds.startup > 0
    rows = result(finished)["rows"]
    assert [step for step, _, _ in rows["pretrain/1"] + rows["pretrain/2"]] == list(range(1, 41))
    assert rows["pretrain/2"][-1][1] < rows["pretrain/1"][0][1] - 0.5  # it learns


def test_a_second_run_finds_everything_finished_without_prefect_or_torch(finished: Path, home: Path) -> None:
    run = Run(home, "run", SMOKE, "--store", str(finished), importtime=True)
    assert run.wait(60) == 0
    output = run.output.read_text()
    assert "All 13 parts of smoke are finished; nothing to run." in output
    assert "the model is in" in output
    assert "apertus-store" not in output
    imported = run.errors.read_text()
    assert "specs.pipeline" in imported
    assert not any(
        f"| {name}\n" in imported.replace("|   ", "| ") or f" {name}\n" in imported
        for name in ("torch", "prefect")
    )


def test_the_exported_folder_is_a_model_that_transformers_opens(finished: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = artifact(plan_of(finished), "export")
    folder = str(Path(exported.store.full(exported.stored_name("config.json"))).parent)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "ApertusForCausalLM"
    text = tokenizer("import json", return_tensors="pt")
    assert text.input_ids[0, 0] == tokenizer.bos_token_id == 1
    with torch.no_grad():
        logits = model(**text).logits
    assert logits.shape == (1, text.input_ids.shape[1], 512)
    assert tokenizer.decode(text.input_ids[0], skip_special_tokens=True) == "import json"
    assert sorted(os.listdir(folder)) == sorted(exported.manifest.files), (
        "whoever hands the folder on hands on the model alone"
    )
    assert "\n# smoke: cooldown\n" in Path(folder, "README.md").read_text()
    assert [path.suffix for path in (Path(folder).parents[1] / "logs").iterdir()] == [".txt"]


@pytest.mark.slow
def test_killed_and_interrupted_runs_end_in_the_same_bits(finished: Path, home: Path, api: str) -> None:
    store = home / "interrupted"
    shutil.copytree(finished, store)
    for kind in ("pretrain", "cooldown", "evaluate", "export", "runs"):
        shutil.rmtree(store / kind)

    # kill -9 of every process in the middle of the second segment
    run = Run(home, "run", SMOKE, "--store", str(store))
    middle = Artifact(Store.open(str(store)), plan_of(store).graph.nodes["pretrain/2"].path)
    run.wait_for(lambda: bool(middle.checkpoint_steps()))
    run.kill_everything()
    step = plan_of(store).steps["pretrain/2"]
    assert step.action == "resume"
    assert step.resume_step in range(21, 40)

    # SIGTERM to the process group in the middle of the cooldown, twice: a checkpoint, and nothing left behind
    run = Run(home, "run", SMOKE, "--store", str(store))
    annealing = Artifact(Store.open(str(store)), plan_of(store).graph.nodes["cooldown"].path)
    run.wait_for(lambda: bool(annealing.checkpoint_steps()))
    ended_as_interrupted(run, lambda: group_twice(run, signal.SIGTERM))
    assert plan_of(store).steps["cooldown"].action in ("resume", "reuse")

    run = Run(home, "run", SMOKE, "--store", str(store), api=api)
    assert run.wait() == 0, run.text
    assert result(store) == result(finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "processes"),
    [("kill -9 of the launcher", 1), ("kill -9 of the launcher", 2), ("Ctrl-C", 1)],
)
def test_when_the_launcher_is_gone_its_stages_commit_and_end(
    finished: Path, home: Path, how: str, processes: int
) -> None:
    longer = "stages.cooldown.budget=500 steps"
    store = home / f"{how}-{processes}".replace(" ", "-")
    run = cooling_run(finished, store, home, longer, processes=processes)
    annealing = Artifact(Store.open(str(store)), plan_of(store, longer).graph.nodes["cooldown"].path)
    run.wait_for(lambda: len(annealing.checkpoint_steps()) >= 2)
    if how == "Ctrl-C":
        ended_as_interrupted(run, lambda: os.killpg(run.process.pid, signal.SIGINT))  # as a terminal does
        assert "the run was stopped by Ctrl-C" in run.text
    else:
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
    assert run.no_process_is_left(20), "processes outlived the run"
    last = annealing.checkpoint_steps()[-1]
    assert last < 500
    ranks = {name for name in annealing.checkpoint(last).marker.files if name.startswith("rank-")}
    # every rank wrote its shard
    assert ranks == {f"rank-{rank:05d}.safetensors" for rank in range(processes)}
    annealing.checkpoint(last).check()


@pytest.mark.slow
def test_stages_that_do_not_need_each_other_can_run_at_the_same_time(
    finished: Path, home: Path, api: str
) -> None:
    store = home / "concurrent"
    shutil.copytree(finished, store)
    shutil.rmtree(store / "corpus")
    run = Run(
        home, "run", SMOKE, "--store", str(store), "--until", "corpus", "--set", "concurrency=3", api=api
    )
    run.wait_for(lambda: len(run.stages_running()) == 3)
    assert run.wait() == 0, run.text
    for name in ("corpus/code", "corpus/reference", "corpus/translations"):
        digests, before = (
            {file: record.sha256 for file, record in artifact(plan_of(place), name).manifest.files.items()}
            for place in (store, finished)
        )
        assert digests == before


@pytest.mark.slow
def test_a_gate_that_is_not_met_stops_what_comes_after_with_a_message(
    finished: Path, home: Path, api: str
) -> None:
    store = home / "gated"
    shutil.copytree(finished, store)
    shutil.rmtree(store / "export")
    gate = "stages.evaluate.gates=[{metric: perplexity, max: 2}]"
    run = Run(home, "run", SMOKE, "--store", str(store), overrides=[gate], api=api)
    assert run.wait() == 1
    assert "failed: evaluate: gate on perplexity:" in run.text
    assert "is above the allowed 2" in run.text
    assert "failed: export: not run, since evaluate did not finish" in run.text
    assert "Traceback" not in run.text


@pytest.mark.slow
def test_a_stage_whose_process_is_killed_is_tried_again(finished: Path, home: Path, api: str) -> None:
    store = home / "retried"
    shutil.copytree(finished, store)
    shutil.rmtree(store / "export")
    run = Run(home, "run", SMOKE, "--store", str(store), overrides=["retries.backoff=1s"], api=api)
    run.wait_for(lambda: bool(run.stage_processes()))
    for pid in run.stage_processes():
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert "stop evaluate/model" in run.text
    assert "done evaluate/model" in run.text and "kept export" in run.text


@pytest.mark.parametrize("arguments", [["plan"], ["run"], ["status"], ["lineage", "export"]])
def test_a_bad_spec_is_a_message_and_exit_code_2(home: Path, tmp_path: Path, arguments: list[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text((ROOT / SMOKE).read_text().replace("budget: 10 steps", "budgte: 10 steps"))
    run = Run(home, arguments[0], str(bad), *arguments[1:], "--store", str(tmp_path / "store"))
    assert run.wait(60) == 2
    assert "there is no field 'budgte' here. Fix: did you mean 'budget'?" in run.text
    assert "Traceback" not in run.text
    assert not (tmp_path / "store").exists()


def test_a_prefect_server_that_does_not_answer_is_a_message(finished: Path, home: Path) -> None:
    store = home / "serverless"
    shutil.copytree(finished, store)
    shutil.rmtree(store / "export")
    run = Run(home, "run", SMOKE, "--store", str(store), api="http://127.0.0.1:9/api")
    assert run.wait(60) == 2
    assert "no Prefect server answers at http://127.0.0.1:9/api" in run.text
    assert "Traceback" not in run.text


def test_status_and_lineage_as_json(finished: Path, home: Path) -> None:
    status = Run(home, "status", SMOKE, "--store", str(finished), "--json")
    assert status.wait(60) == 0
    parts = {part["name"]: part for part in json.loads(status.output.read_text())["parts"]}
    assert parts["pretrain/2"]["state"] == "finished"
    assert set(parts["pretrain/2"]["seconds"]) == {"startup", "compute", "storage"}
    lineage = Run(home, "lineage", SMOKE, "export", "--store", str(finished), "--json")
    assert lineage.wait(60) == 0
    document = json.loads(lineage.output.read_text())
    corpus = document["inputs"]["checkpoint"]["inputs"]["mixture"]["inputs"]["source:0"]
    assert corpus["inputs"]["documents"]["source"]["license"] in ("PSF-2.0", "BSD-3-Clause")
