from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from apertus_model.files import copy_folder
from apertus_model.stages.harness import ENVIRONMENT, HarnessError, check_tasks, finite, flat
from infra.store import Artifact
from tests.apertus_model.preference_artifacts import put_model

TASK = {"tasks": ["stdlib_functions"], "include": "installed:examples/tasks"}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stage sets in the environment of its process is taken back."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", "")


def test_without_the_extra_the_message_says_how_to_install_it(
    bench: Any, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(HarnessError, match=r"pip install 'apertus\[harness\]'"):
        bench.run("harness", "h", {"harness": TASK}, {"model": put_model(bench, tokenizer)})


@pytest.mark.parametrize(
    "text",
    [
        "doc_to_text: !function utils.text",
        "a:\n  - b\n  - !!python/object/apply:os.system ['true']",
        "x: ! y",
    ],
)
def test_task_files_with_tags_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "task.yaml").write_text(f"task: mine\n{text}\n")
    line = text.count("\n") + 2
    with pytest.raises(
        HarnessError, match=rf"task file sub/task.yaml, line {line}, has the tag '!.*tags run code"
    ):
        check_tasks(tmp_path)


def test_text_that_looks_like_a_tag_is_none(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(
        "task: mine\ndoc_to_text: 'Hello !function {{x}}'  # !function\nother: a !b\n"
    )
    check_tasks(tmp_path)


@pytest.mark.parametrize("included", ["data.json", "../outside.yaml", "[fine.yaml, /outside.yaml]"])
def test_task_files_include_checked_files_only(tmp_path: Path, included: str) -> None:
    (tmp_path / "fine.yaml").write_text("task: fine\n")
    (tmp_path / "task.yaml").write_text("include: fine.yaml\n")
    check_tasks(tmp_path)
    (tmp_path / "task.yaml").write_text(f"include: {included}\n")
    with pytest.raises(HarnessError, match=r"task file task\.yaml includes '(data\.json|.*outside\.yaml)'"):
        check_tasks(tmp_path)


def test_a_file_that_is_no_yaml_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("a: 'b\n")
    with pytest.raises(HarnessError, match=r"task file task\.yaml is not YAML"):
        check_tasks(tmp_path)


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


def test_metrics_are_named_by_task_and_filter() -> None:
    results = {
        "t": {
            "alias": "t",
            "acc,none": 0.5,
            "acc_stderr,none": "N/A",
            "exact_match,strict": 1,
            "sample_len": 7,
            "bad,none": float("nan"),
        }
    }
    assert flat(results) == {"t/acc": 0.5, "t/exact_match/strict": 1.0}
    assert finite(results)["t"]["bad,none"] is None


class TestWithTheExtra:
    """Run where lm-evaluation-harness is installed."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")

    def test_the_example_task_runs_on_an_exported_model_whose_layers_may_lie_on_several_gpus(
        self, bench: Any, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from lm_eval.models.huggingface import HFLM

        stated, opened = [], HFLM.__init__
        monkeypatch.setattr(
            HFLM, "__init__", lambda self, **k: (stated.append(k["parallelize"]), opened(self, **k))[1]
        )
        launch = {"processes": 2, "parallel": {"tp": 2}}
        artifact = bench.run(
            "harness",
            "h",
            {"harness": TASK | {"limit": 8}},
            {"model": put_model(bench, tokenizer)},
            launch=launch,
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

    def test_a_task_that_does_not_exist_is_a_message(self, bench: Any, tokenizer: Artifact) -> None:
        with pytest.raises(HarnessError, match="there is no task no_such_task"):
            bench.run(
                "harness",
                "h",
                {"harness": TASK | {"tasks": ["no_such_task"]}},
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
                {"harness": {"tasks": ["mine"], "include": str(folder)}},
                {"model": put_model(bench, tokenizer)},
            )
