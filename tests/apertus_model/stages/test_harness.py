from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from apertus_model.evaluation.harness.answers import read_answers
from apertus_model.evaluation.harness.tasks import HarnessError, check_tasks, installed_folder
from apertus_model.evaluation.sandbox import INSTALL, KINDS, SandboxError
from apertus_model.files import copy_folder
from apertus_model.generation import local_folder
from apertus_model.stages.harness import DATA, ENVIRONMENT
from infra.store import Artifact
from tests.apertus_model.attempts import Interrupted, StopsAfterOneUnit, children, stored_bytes, units_of
from tests.apertus_model.evaluation.task_data import (
    ARC,
    GPQA,
    GSM8K,
    WIKITEXT,
    write_arc,
    write_dataset,
    write_gpqa,
    write_gsm8k,
    write_wikitext,
)
from tests.apertus_model.preference_artifacts import put_model
from tests.apertus_model.rewards.test_classifier import write_classifier

OWN = {"suite": {"tasks": ["stdlib_functions"]}, "include": "installed:examples/tasks"}
THREE = ["arc_easy", "gsm8k", "wikitext"]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stage sets in the environment of its process is taken back."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", "")


def test_without_the_extra_the_message_says_how_to_install_it(
    bench: Any, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == "apertus_model.evaluation.harness.collector"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lm_eval.api.instance", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(HarnessError, match=r"pip install 'apertus\[harness\]'"):
        bench.run("harness", "h", OWN, {"model": put_model(bench, tokenizer)})


def test_the_example_task_is_installed_and_well_formed(tmp_path: Path) -> None:
    folder = copy_folder("installed:examples/tasks", tmp_path / "tasks", ["**/*.yaml", "**/*.jsonl"])
    check_tasks(folder)
    questions = [
        json.loads(line)
        for line in (folder / "stdlib_functions" / "questions.jsonl").read_text().splitlines()
    ]
    assert len(questions) == 100
    assert len({(one["module"], one["name"]) for one in questions}) == 100
    assert all(len(set(one["choices"])) == 4 and 0 <= one["answer"] < 4 for one in questions)
    answers = [one["answer"] for one in questions]
    assert max(map(answers.count, range(4))) < 40
    assert not list(folder.rglob("*.py"))


def without_template(artifact: Artifact, folder: Path, *, weights: bool = True) -> Path:
    """The files of a model but its chat template."""
    local_folder(artifact, folder, weights=weights)
    (folder / "chat_template.jinja").unlink()
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    stated.pop("chat_template", None)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


def by_hand(
    model: Path, datasets: Path, tasks: list[str], out: Path, *more: str, of_model: str = ""
) -> dict[str, float]:
    """What the harness's own command line reports for the same folder and the same snapshots. `of_model`:
    further arguments of its model."""
    from apertus_model.evaluation.harness.run import flat

    command = [
        "-m",
        "lm_eval",
        "run",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model}{of_model}",
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        [sys.executable, *command, "--tasks", ",".join(tasks), "--output_path", str(out), *more],
        cwd=datasets,
        env=os.environ | {"HF_HOME": str(out / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = out.rglob("results_*.json")
    return flat(json.loads(report.read_text())["results"])


class TestWithTheExtra:
    """Run where lm-evaluation-harness is installed."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")

    def run(self, bench: Any, model: Artifact, folder: Path, suite: dict[str, Any]) -> Artifact:
        """A suite of the three tasks' data sets, which any artifact stands for among the inputs."""
        data = {f"{DATA}{name}": model for name in (ARC, GSM8K, WIKITEXT)}
        found: Artifact = bench.run(
            "harness", "h", {"suite": suite, "datasets": str(folder)}, {"model": model} | data
        )
        return found

    def test_the_example_task_runs_on_an_exported_model_whose_layers_may_lie_on_several_gpus(
        self, bench: Any, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from lm_eval.models.huggingface import HFLM

        stated, opened = [], HFLM.__init__
        monkeypatch.setattr(
            HFLM, "__init__", lambda self, **k: (stated.append(k["parallelize"]), opened(self, **k))[1]
        )
        launch = {"processes": 2, "parallel": {"tp": 2}}
        suite = OWN["suite"] | {"limit": 8}  # type: ignore[operator]
        artifact = bench.run(
            "harness", "h", OWN | {"suite": suite}, {"model": put_model(bench, tokenizer)}, launch=launch
        )
        assert stated == [True]
        metrics = artifact.manifest.metrics
        assert set(metrics) == {
            f"stdlib_functions/{name}" for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
        }
        assert metrics["stdlib_functions/acc"] * 8 == pytest.approx(
            round(metrics["stdlib_functions/acc"] * 8)
        )
        assert (
            artifact.json("results.json")["results"]["stdlib_functions"]["acc,none"]
            == metrics["stdlib_functions/acc"]
        )

    def test_metrics_can_be_recomputed_from_the_stored_answers(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path
    ) -> None:
        folder = tmp_path / "data"
        for write in (write_arc, write_gsm8k, write_wikitext):
            write(folder)
        suite = {"tasks": THREE, "generation": {"max_gen_toks": 8}, "few_shot": 1}
        artifact = self.run(bench, put_model(bench, tokenizer), folder, suite)
        rows, metrics = read_answers(artifact.local("answers.parquet")), artifact.manifest.metrics
        arc = [row for row in rows if row["task"] == "arc_easy"]
        best = [max(range(4), key=row["log_likelihoods"].__getitem__) for row in arc]
        assert [row["target"] for row in arc] == [0, 1, 2, 3, 0, 1]
        assert (
            metrics["arc_easy/acc"] == sum(a == row["target"] for a, row in zip(best, arc, strict=True)) / 6
        )
        perplexed = [row for row in rows if row["task"] == "wikitext"]
        words = sum(row["metrics"]["word_perplexity"][1] for row in perplexed)
        total = sum(row["log_likelihoods"][0] for row in perplexed)
        assert metrics["wikitext/word_perplexity"] == pytest.approx(math.exp(-total / words), rel=1e-12)
        rows_of_task = [row for row in rows if row["task"] == "gsm8k"]
        assert {row["filter"] for row in rows_of_task} == {"strict-match", "flexible-extract"}
        assert len(rows_of_task) == 8
        for row in rows_of_task:
            pattern = (
                r"#### (\-?[0-9\.\,]+)" if row["filter"] == "strict-match" else r"-?[$0-9.,]{2,}|-?[0-9]+"
            )
            found = re.findall(pattern, row["answers"][0])
            at = 0 if row["filter"] == "strict-match" else -1
            assert row["filtered"] == [found[at] if found else "[invalid]"]
            assert row["prompts"][0].count("Question:") == 2
        shown = artifact.json("shown.json")["answers"]
        assert {(one["task"], one["chosen"]) for one in shown} == {
            *((task, "worst") for task in THREE),
            ("arc_easy", "random"),
            ("gsm8k", "random"),
        }

    def test_scores_of_a_task_are_those_of_the_harness_by_hand(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path
    ) -> None:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from apertus_model.evaluation.harness.run import flat

        write_arc(tmp_path)
        model = put_model(bench, tokenizer)
        artifact = self.run(bench, model, tmp_path, {"tasks": ["arc_easy"], "few_shot": 2})
        arc = installed_folder() / "arc"
        with contextlib.chdir(tmp_path):  # where `allenai/ai2_arc` is a folder
            found = lm_eval.simple_evaluate(
                HFLM(str(local_folder(model, tmp_path / "m")), device="cpu", batch_size=3),
                tasks=["arc_easy"],
                num_fewshot=2,
                task_manager=TaskManager(include_path=str(arc), include_defaults=False),
            )
        assert found is not None and artifact.manifest.metrics == flat(found["results"])
        rows = read_answers(artifact.local("answers.parquet"))
        by_hand = [[response[0][0] for response in one["resps"]] for one in found["samples"]["arc_easy"]]
        assert [row["log_likelihoods"] for row in rows] == by_hand

    @pytest.mark.slow
    def test_scores_are_those_of_the_command_line_to_the_last_digit(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path
    ) -> None:
        folder = tmp_path / "data"
        for write in (write_arc, write_gsm8k, write_wikitext):
            write(folder)
        model = put_model(bench, tokenizer)
        suite = {"tasks": THREE, "generation": {"max_gen_toks": 8}, "few_shot": 2}
        artifact = self.run(bench, model, folder, suite)
        exported = bench.folder / "scratch" / "harness" / "h" / "first" / "work" / "model"
        more = ("--batch_size", "64", "--num_fewshot", "2", "--gen_kwargs", "max_gen_toks=8")
        found = by_hand(exported, folder, THREE[:2], tmp_path / "out", *more)
        # the command line puts two BOS before a whole text; this argument leaves one out
        one_bos = ",add_bos_token=False"
        found |= by_hand(exported, folder, THREE[2:], tmp_path / "whole", *more, of_model=one_bos)
        assert artifact.manifest.metrics == found
        assert len(found) == 11

    @pytest.mark.slow
    def test_a_task_among_others_asks_what_the_command_line_asks_for_it_alone(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path
    ) -> None:
        folder, tasks = tmp_path / "data", ["gpqa_diamond_zeroshot", "gpqa_main_zeroshot"]
        write_gpqa(folder)
        model = put_model(bench, tokenizer)
        stated = {"suite": {"tasks": tasks}, "datasets": str(folder)}
        artifact = bench.run("harness", "h", stated, {"model": model, f"{DATA}{GPQA}": model})
        exported = local_folder(model, tmp_path / "exported")
        found = by_hand(exported, folder, tasks[1:], tmp_path / "out", "--batch_size", "64", "--log_samples")
        (log,) = tmp_path.rglob("samples_gpqa_main_zeroshot_*.jsonl")
        logged = [json.loads(line) for line in log.read_text().splitlines()]
        rows = [row for row in read_answers(artifact.local("answers.parquet")) if row["task"] == tasks[1]]
        theirs = [[one["arg_0"] for one in row["arguments"].values()] for row in logged]
        assert [row["prompts"] for row in rows] == theirs and len(rows) == 6
        assert {name: artifact.manifest.metrics[name] for name in found} == found

    def test_neither_workers_nor_a_death_change_a_bit(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path
    ) -> None:
        class Dies(StopsAfterOneUnit):
            LAST = 4

        run = self.units(bench, tokenizer, tmp_path)
        with pytest.raises(Interrupted):
            run("killed", attempt_class=Dies)
        kinds = [key.partition("-")[0] for key in units_of(bench, "harness/killed", "first")]
        assert kinds == ["loglikelihood", "requests", "requests", "requests"]
        whole = run("killed", attempt="second")
        kinds = [key.partition("-")[0] for key in units_of(bench, "harness/killed", "second")]
        assert kinds == ["generate_until", "loglikelihood_rolling"]
        assert run("two", workers=2) == whole

    @pytest.mark.slow
    def test_five_workers_of_which_some_are_killed_change_no_bit(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        run = self.units(bench, tokenizer, tmp_path, documents=900)
        whole = run("one")
        chance, over, killed = random.Random(), threading.Event(), []

        def kill() -> None:
            """Two workers, each after the first answers and at a moment that differs from run to run."""
            while len(killed) < 2 and not over.wait(chance.uniform(0.0, 0.3)):
                workers = children(os.getpid())
                if workers and len(bench.store.names("harness/five/units")) > 3:
                    os.kill(chance.choice(workers), signal.SIGKILL)
                    killed.append(1)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        try:
            assert run("five", workers=5) == whole
        finally:
            over.set()
            killer.join()
        assert "exit code -9" in capfd.readouterr().out

    def units(self, bench: Any, tokenizer: Artifact, tmp_path: Path, documents: int = 6) -> Any:
        """Runs a suite of requests of all types, with sampled answers: `(fingerprint, ...) -> files`."""
        folder, model = tmp_path / "data", put_model(bench, tokenizer)
        write_arc(folder, documents)
        write_gsm8k(folder)
        write_wikitext(folder)
        drawn = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
        stated = {"suite": {"tasks": THREE, "generation": drawn}, "datasets": str(folder)}
        inputs = {"model": model} | {f"{DATA}{name}": model for name in (ARC, GSM8K, WIKITEXT)}
        return lambda name, **more: stored_bytes(bench.run("harness", name, stated, inputs, **more))

    def test_code_and_toxicity_are_scored_by_the_stage(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path
    ) -> None:
        if shutil.which("bwrap") is None:
            pytest.skip(f"bubblewrap is not installed: {INSTALL}")
        problem = {"task_id": "HumanEval/0", "entry_point": "f", "canonical_solution": "    return 1\n"}
        rows = [problem | {"prompt": "def f():\n", "test": "def check(f):\n    assert f() == 1\n"}] * 2
        write_dataset(tmp_path / "d", "openai/openai_humaneval", {"openai_humaneval": {"test": rows}})
        prompts = [{"prompt": {"text": f"Once {index}"}} for index in range(2)]
        write_dataset(tmp_path / "d", "allenai/real-toxicity-prompts", {"default": {"train": prompts}})
        classifier = write_classifier(tmp_path / "classifier", labels=2, template=None)
        model = put_model(bench, tokenizer)
        roles = (f"{DATA}openai/openai_humaneval", f"{DATA}allenai/real-toxicity-prompts", "classifier")
        suite = {
            "tasks": ["humaneval", "realtoxicityprompts"],
            "generation": {"max_gen_toks": 4},
            "sandbox": "bubblewrap",
            "classifier": {"model": str(classifier), "label": "LABEL_1"},
        }
        stated = {"suite": suite, "datasets": str(tmp_path / "d")}
        artifact = bench.run("harness", "h", stated, {"model": model} | dict.fromkeys(roles, model))
        metrics, name = artifact.manifest.metrics, "create_test"
        outcomes = {kind: metrics[f"humaneval/{kind}/{name}"] for kind in KINDS}
        assert sum(outcomes.values()) == 2
        assert metrics[f"humaneval/pass@1/{name}"] == outcomes["passed"] / 2
        answers = read_answers(artifact.local("answers.parquet"))
        read = [row["metrics"]["LABEL_1"] for row in answers if row["task"] == "realtoxicityprompts"]
        assert metrics["realtoxicityprompts/LABEL_1"] == pytest.approx(sum(read) / 2, abs=1e-12)
        assert metrics["realtoxicityprompts/score"] == sum(value >= 0.5 for value in read) / 2

    def test_without_bubblewrap_the_stage_refuses_before_the_model_is_loaded(
        self, bench: Any, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setattr(
            "apertus_model.evaluation.harness.model.open_model", lambda *_: pytest.fail("loaded")
        )
        stated = {"suite": {"tasks": ["humaneval"], "sandbox": "bubblewrap"}}
        with pytest.raises(SandboxError, match=r"bubblewrap is not installed\. Fix: apt-get install"):
            bench.run("harness", "h", stated, {"model": put_model(bench, tokenizer)})

    def test_a_chat_template_that_the_model_lacks_is_a_message(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_arc(tmp_path)
        model = put_model(bench, tokenizer)
        assert "chat_template.jinja" in model.manifest.files
        monkeypatch.setattr("apertus_model.stages.harness.local_folder", without_template)
        with pytest.raises(HarnessError, match="the tokenizer of the model has no chat template"):
            self.run(bench, model, tmp_path, {"tasks": ["arc_easy"], "chat_template": True})

    def test_a_column_that_a_snapshot_lacks_is_a_message(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path
    ) -> None:
        rows = [{"question": "?", "choices": {"text": ["a"], "label": ["A"]}}]
        write_dataset(tmp_path, ARC, {"ARC-Easy": {"train": rows, "validation": rows, "test": rows}})
        with pytest.raises(HarnessError, match=r"the tasks arc_easy cannot be run: .*answerKey"):
            self.run(bench, put_model(bench, tokenizer), tmp_path, {"tasks": ["arc_easy"]})

    def test_a_task_that_does_not_exist_is_a_message(self, bench: Any, tokenizer: Artifact) -> None:
        with pytest.raises(HarnessError, match="there is no task no_such_task"):
            bench.run(
                "harness",
                "h",
                OWN | {"suite": {"tasks": ["no_such_task"]}},
                {"model": put_model(bench, tokenizer)},
            )

    def test_templates_of_tasks_cannot_reach_into_python(
        self, bench: Any, tokenizer: Artifact, tmp_path: Path
    ) -> None:
        folder = tmp_path / "mine"
        folder.mkdir()
        (folder / "rows.jsonl").write_text('{"q": "x"}\n')
        (folder / "task.yaml").write_text(
            "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split:"
            " test\noutput_type: multiple_choice\ndoc_to_text: \"{{ ''.__class__.__mro__ }}\"\ndoc_to_choice:"
            " [a, b]\ndoc_to_target: 0\n"
        )
        with pytest.raises(HarnessError, match="unsafe"):
            bench.run(
                "harness",
                "h",
                {"suite": {"tasks": ["mine"]}, "include": str(folder)},
                {"model": put_model(bench, tokenizer)},
            )
