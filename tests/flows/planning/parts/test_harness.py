"""Parts of suites of tasks: what a plan looks up, and what it refuses."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from apertus_model.evaluation.harness.needs import Needs
from flows.planning.parts import harness as parts
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.harness import HarnessPart
from tests.apertus_model.evaluation.task_data import ARC, write_arc, write_dataset, write_gsm8k
from tests.recipes import write_recipe

Planned = Callable[..., Plan]
pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")


def suites(datasets: Path | str, **stated: str) -> str:
    named = ", ".join(f"{name}: {suite}" for name, suite in stated.items())
    return f"stages.evaluate.harness={{datasets: {datasets}, suites: {{{named}}}}}"


def refused(planned: Planned, *overrides: str) -> str:
    with pytest.raises(SpecError) as error:
        planned(*overrides)
    return str(error.value)


def test_each_suite_is_a_part_that_reads_the_data_sets_of_its_tasks(planned: Planned, tmp_path: Path) -> None:
    write_arc(tmp_path / "d")
    write_gsm8k(tmp_path / "d")
    stated = {"a": "{tasks: [arc_easy]}", "b": "{tasks: [gsm8k], few_shot: 1}"}
    plan = planned(suites(tmp_path / "d", **stated))
    nodes = plan.graph.nodes
    assert list(nodes["evaluate/harness/a"].inputs) == ["model", f"data:{ARC}"]
    assert list(nodes["evaluate/harness/b"].inputs) == ["model", "data:openai/gsm8k"]
    assert {"harness:a", "harness:b"} <= set(nodes["evaluate"].inputs)
    part = nodes["evaluate/harness/b"].part
    assert isinstance(part, HarnessPart) and part.suite.chat_template is False
    assert "evaluate: 'a' asks 1 tasks as plain text, 'b' asks 1 tasks as plain text" in plan.graph.notes
    assert plan.to_json()["tasks"] == {
        "evaluate/harness/a": {"arc_easy": ["arc_easy"]},
        "evaluate/harness/b": {"gsm8k": ["gsm8k"]},
    }
    prints = {name: nodes[name].fingerprint for name in ("evaluate/harness/a", "evaluate/harness/b")}
    # another place is the same; another setting or other contents are another part
    (tmp_path / "d").rename(tmp_path / "e")
    stated["b"] = "{tasks: [gsm8k], few_shot: 2}"
    moved = planned(suites(tmp_path / "e", **stated)).graph.nodes
    assert moved["evaluate/harness/a"].fingerprint == prints["evaluate/harness/a"]
    assert moved["evaluate/harness/b"].fingerprint != prints["evaluate/harness/b"]
    (tmp_path / "e" / ARC / ".cache" / "other").write_text("a later download")
    again = planned(suites(tmp_path / "e", **stated)).graph.nodes
    assert again["evaluate/harness/a"].fingerprint == prints["evaluate/harness/a"]
    card = (tmp_path / "e" / ARC / "README.md").read_text()
    (tmp_path / "e" / ARC / "README.md").write_text(card + "more\n")
    changed = planned(suites(tmp_path / "e", **stated)).graph.nodes
    assert changed["evaluate/harness/a"].fingerprint != prints["evaluate/harness/a"]


def test_all_that_is_missing_is_one_message_with_the_commands(planned: Planned, tmp_path: Path) -> None:
    folder = write_arc(tmp_path)
    (folder / "ARC-Easy").rename(folder / "ARC-Hard")
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card.replace("ARC-Easy", "ARC-Hard"))
    message = refused(planned, suites(tmp_path, a="{tasks: [arc_easy, piqa]}", b="{tasks: [gsm8k]}"))
    assert f"stages.evaluate.harness.datasets: 3 data sets of the tasks are not in {tmp_path}:" in message
    for line in (
        "allenai/ai2_arc: no subset ARC-Easy: .*ARC-Hard.*",
        "baber/piqa: not there",
        "openai/gsm8k: not there",
        "on a machine with a network:",
        f"hf download --repo-type dataset baber/piqa --local-dir {tmp_path}/baber/piqa",
        f"hf download --repo-type dataset openai/gsm8k --local-dir {tmp_path}/openai/gsm8k",
    ):
        assert re.search(line, message), (line, message)
    assert message.count("Fix:") == 1


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ("{tasks: [arc_esy]}", r"tasks\[0\]: lm-evaluation-harness [\d.]+ has no task 'arc_esy'.*arc_easy"),
        ("{tasks: [arc_easy, ai2_arc]}", "arc_easy and ai2_arc both have the task arc_easy"),
        (
            "{tasks: [realtoxicityprompts]}",
            "realtoxicityprompts cannot be run: it asks a web service about each answer.*set classifier:",
        ),
        (
            "{tasks: [cruxeval_input], sandbox: bubblewrap}",
            "cruxeval_input cannot be run: it may run code of the model outside the sandbox",
        ),
        (
            "{tasks: [mbpp]}",
            "mbpp cannot be run: it runs the code that the model writes.*sandbox: bubblewrap",
        ),
        ("{tasks: [arc_easy], chat_template: true}", "the model has no chat template"),
    ],
)
def test_tasks_that_cannot_be_run_are_refused_with_the_reason(
    planned: Planned, tmp_path: Path, suite: str, message: str
) -> None:
    write_arc(tmp_path)
    found = refused(planned, suites(tmp_path, a=suite))
    assert re.search(message, found, re.DOTALL), found


def test_packages_that_are_not_installed_are_named(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "needs_of", lambda task: Needs(task.name, packages=("one", "two")))
    found = refused(planned, suites(tmp_path, a="{tasks: [ifeval]}"))
    assert "ifeval need packages that are not installed: one, two" in found
    assert "pip install one two" in found


def test_code_of_models_is_planned_with_a_sandbox(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"task_id": 1, "text": "t", "code": "c", "test_list": ["assert True"]}]
    write_dataset(tmp_path, "google-research-datasets/mbpp", {"full": {"test": rows}})
    stated = suites(tmp_path, a="{tasks: [mbpp], sandbox: bubblewrap}")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    plan = planned(stated)
    part = plan.graph.nodes["evaluate/harness/a"].part
    assert isinstance(part, HarnessPart) and part.suite.sandbox == "bubblewrap"
    assert not any("bubblewrap" in note for note in plan.graph.notes)
    # The machine that runs the suite may be another: a plan tells, and a run refuses.
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = (
        "evaluate: 'a' needs bubblewrap where it runs, and this machine has none: apt-get install bubblewrap"
    )
    assert missing in planned(stated).graph.notes


def test_a_classifier_is_an_input_by_its_content(planned: Planned, tmp_path: Path) -> None:
    rows = [{"prompt": {"text": "t"}}]
    write_dataset(tmp_path / "d", "allenai/real-toxicity-prompts", {"default": {"train": rows}})
    classifier = tmp_path / "classifier"
    classifier.mkdir()
    (classifier / "config.json").write_text("{}")

    def fingerprint(folder: Path, label: str = "toxic") -> str:
        suite = f"{{tasks: [realtoxicityprompts], classifier: {{model: {folder}, label: {label}}}}}"
        node = planned(suites(tmp_path / "d", a=suite)).graph.nodes["evaluate/harness/a"]
        assert list(node.inputs) == ["model", "classifier", "data:allenai/real-toxicity-prompts"]
        return node.fingerprint

    first = fingerprint(classifier)
    assert fingerprint(classifier, "rude") != first
    assert fingerprint(classifier.rename(tmp_path / "moved")) == first
    (tmp_path / "moved" / "config.json").write_text('{"other": 1}')
    assert fingerprint(tmp_path / "moved") != first
    absent = f"{{tasks: [realtoxicityprompts], classifier: {{model: {tmp_path}/none, label: toxic}}}}"
    assert "suites.a.classifier.model" in refused(planned, suites(tmp_path / "d", a=absent))


def test_data_sets_need_a_folder(planned: Planned) -> None:
    found = refused(planned, "stages.evaluate.harness={suites: {a: {tasks: [arc_easy, gsm8k]}}}")
    assert "the tasks read allenai/ai2_arc, openai/gsm8k, and datasets is not stated" in found


def test_own_task_files_with_tags_are_refused_by_the_plan(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\ndoc_to_text: !function utils.text\n")
    found = refused(
        planned, f"stages.evaluate.harness={{include: {tmp_path}, suites: {{a: {{tasks: [mine]}}}}}}"
    )
    assert "task file mine.yaml, line 2, has the tag '!function'" in found


def test_instruct_models_are_asked_through_their_chat_template(chat: Planned, tmp_path: Path) -> None:
    write_arc(tmp_path)
    stated = suites(tmp_path, a="{tasks: [arc_easy]}").replace("evaluate.", "evaluate-sft.")
    plan = chat(stated)
    part = plan.graph.nodes["evaluate-sft/harness/a"].part
    assert isinstance(part, HarnessPart) and part.suite.chat_template and part.suite.few_shot_as_turns
    assert "evaluate-sft: 'a' asks 1 tasks through the chat template" in plan.graph.notes


@pytest.mark.parametrize(
    ("metric", "nearest"),
    [
        ("a/arc_easy/acc", ""),
        ("a/arc_easy/acc_norm_stderr", ""),
        ("b/arc_easy/acc", "a/arc_easy/acc"),  # no such suite
        ("a/arc_esy/acc", "a/arc_easy/acc"),
        ("a/arc_easy/acc_nrm", "a/arc_easy/acc_norm"),
        ("a/arc_easy/acc/flexible-extract", "a/arc_easy/acc"),
    ],
)
def test_gates_and_references_name_metrics_of_the_tasks(
    planned: Planned, tmp_path: Path, metric: str, nearest: str
) -> None:
    write_arc(tmp_path)
    stated = suites(tmp_path, a="{tasks: [arc_easy]}")
    score = "{value: 1, unit: metric, source: a report}"
    for path, override in (
        ("gates[0].metric", f"stages.evaluate.gates=[{{metric: {metric}, min: 0}}]"),
        (f"reference.{metric}", f"stages.evaluate.reference={{{metric}: {score}}}"),
    ):
        if not nearest:
            planned(stated, override)
            continue
        found = refused(planned, stated, override)
        assert f"stages.evaluate.{path}: 'evaluate' will not have a metric '{metric}'" in found
        assert f"did you mean '{nearest}" in found


def test_a_tag_has_no_mean_and_the_plan_says_so(planned: Planned, tmp_path: Path) -> None:
    write_arc(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    for name in ("one", "two"):
        (own / f"{name}.yaml").write_text(
            f"task: {name}\ntag: both\ndataset_path: {ARC}\ndataset_name: ARC-Easy\ntest_split: test\n"
            "output_type: multiple_choice\ndoc_to_text: '?'\ndoc_to_target: 0\ndoc_to_choice: [a, b]\n"
        )
    (own / "mean.yaml").write_text(
        "group: mean\ntask: [both]\naggregate_metric_list: [{metric: acc, weight_by_size: false}]\n"
    )
    gate = "stages.evaluate.gates=[{metric: a/NAME/acc, min: 0}]"
    tag, mean = (
        suites(tmp_path, a=f"{{tasks: [{name}]}}").replace("{", f"{{include: {own}, ", 1)
        for name in ("both", "mean")
    )
    reason = ", both without a mean (a tag; a group in include has one)"
    assert planned(mean).graph.tasks == {"evaluate/harness/a": {"mean": ["one", "two"]}}
    assert any(reason in note for note in planned(tag).graph.notes)
    assert "will not have a metric 'a/both/acc'" in refused(planned, tag, gate.replace("NAME", "both"))
    assert not any(reason in note for note in planned(mean, gate.replace("NAME", "mean")).graph.notes)


def test_declared_data_sets_that_are_unavailable_are_planned(tmp_path: Path, store: Store) -> None:
    path = write_recipe(tmp_path)
    path.write_text(path.read_text() + f"assumed_inputs: {{files: [{tmp_path}/later]}}\n")
    plan = make(load(path, [suites(f"{tmp_path}/later", a="{tasks: [ifeval]}")]), store)
    read = plan.graph.nodes["evaluate/harness/a"].inputs["data:google/IFEval"]
    assert read.name in plan.graph.unavailable and read.fingerprint.startswith("declared:")


def test_looking_up_tasks_imports_neither_torch_nor_the_harness() -> None:
    code = (
        "import sys\nimport flows.planning.parts.harness as p\nfrom pathlib import Path\n"
        "from apertus_model.evaluation.harness.tasks import Catalogue\n"
        "from apertus_model.evaluation.harness.needs import needs_of\n"
        "assert len([needs_of(task) for task in Catalogue().tasks('mmlu')]) == 57\n"
        "print([name for name in ('torch', 'lm_eval', 'datasets', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
