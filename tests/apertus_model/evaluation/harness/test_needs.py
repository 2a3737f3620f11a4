from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from apertus_model.evaluation.harness import needs
from apertus_model.evaluation.harness.needs import (
    NLTK,
    Needs,
    Reads,
    check_release,
    code_needs,
    fetch_command,
    is_importable,
    needs_of,
    placed,
)
from apertus_model.evaluation.harness.tasks import Catalogue, Function, HarnessError, Task

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")


def of(config: dict[str, Any]) -> Needs:
    return needs_of(Task("x", config))


def test_the_splits_are_those_asked_about_and_those_of_the_examples() -> None:
    base = {"dataset_path": "a/b", "dataset_name": "c"}
    splits = {"training_split": "train", "validation_split": "dev", "test_split": "test"}
    assert of(base | splits).reads == (Reads("a/b", "c", ("test", "train")),)
    assert of(base | {"validation_split": "dev"}).reads[0].splits == ("dev",)
    assert of(base | splits | {"fewshot_split": "dev"}).reads[0].splits == ("test", "dev")
    assert of(base | splits | {"fewshot_config": {"samples": [{}]}}).reads[0].splits == ("test",)
    kwargs = {"dataset_kwargs": {"trust_remote_code": True, "revision": "1", "data_dir": "d"}}
    assert of(base | {"test_split": "test"} | kwargs).reads[0].arguments == (("data_dir", "d"),)


def test_the_columns_are_those_of_the_templates_where_no_code_changes_rows() -> None:
    config = {
        "dataset_path": "a/b",
        "test_split": "t",
        "doc_to_text": "{{q}} {% for c in many %}{{c}}{% endfor %}",
    }
    assert of(config).reads[0].columns == ("many", "q")
    assert of(config | {"process_docs": Function("u.f", Path("/"))}).reads[0].columns == ()
    assert of(config | {"doc_to_target": "{{a if a is defined else b}}"}).reads[0].columns == ("many", "q")
    assert of(config | {"doc_to_target": "answer"}).reads[0].columns == ("many", "q")


@pytest.mark.parametrize(
    ("task", "refusal", "runs_code"),
    [
        ("cruxeval_input", "it may run code of the model outside the sandbox", True),
        ("longproc_pseudo_to_code_2k", "it may run code of the model outside the sandbox", True),
        ("humaneval_64_instruct", "", True),
        ("mmmu_val_art", "it asks about images or sound", False),
        ("humaneval", "", True),
        ("mbpp", "", True),
        ("darija_translation_doda", "it runs code of the Hub to compute", False),
        ("arc_easy", "", False),
    ],
)
def test_tasks_that_cannot_be_run_here_say_why(task: str, refusal: str, runs_code: bool) -> None:
    tasks = [needs_of(one) for one in Catalogue().tasks(task)]
    assert all(one.refusal.startswith(refusal) and bool(one.refusal) is bool(refusal) for one in tasks)
    assert {one.runs_code for one in tasks} == {runs_code}


def test_a_task_file_may_forbid_examples() -> None:
    assert of({"output_type": "generate_until", "num_fewshot": 0}).zero_shot
    assert not of({"output_type": "generate_until", "num_fewshot": 3}).zero_shot
    assert not of({"output_type": "generate_until"}).zero_shot


def test_a_service_that_reads_an_answer_alone_is_replaced() -> None:
    tasks = {name: needs_of(Catalogue().tasks(name)[0]) for name in ("realtoxicityprompts", "arc_easy")}
    assert [one.classified for one in tasks.values()] == [True, False]
    assert tasks["realtoxicityprompts"].refusal == ""
    assert tasks["realtoxicityprompts"].datasets == ["allenai/real-toxicity-prompts"]
    scorer = Catalogue().tasks("realtoxicityprompts")[0].config["process_results"]
    other = of({"dataset_path": "a/b", "process_docs": scorer})
    assert other.refusal.startswith("it asks a web service (requests)") and not other.classified


def test_needs_of_ruler_are_a_tokenizer_texts_and_files_of_the_web() -> None:
    ruler = [needs_of(task) for task in Catalogue().tasks("ruler")]
    assert all(one.tokenizer for one in ruler)
    names = {name for one in ruler for name in one.datasets}
    assert names == {"baber/paul_graham_essays", "namlh2004/hotpotqa", "rajpurkar.github.io", NLTK}
    assert fetch_command(NLTK, ruler, "d") == "python -m nltk.downloader -d d/nltk_data punkt_tab"
    assert fetch_command("rajpurkar.github.io", ruler, "d/") == (
        "curl -L --create-dirs -o d/rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"
        " https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"
    )
    assert fetch_command("namlh2004/hotpotqa", ruler, "d") == (
        "hf download --repo-type dataset namlh2004/hotpotqa --local-dir d/namlh2004/hotpotqa"
    )


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("https://huggingface.co/datasets/a/b/resolve/main/x/y.json", "a/b/x/y.json"),
        ("hf://datasets/a/b@rev/x.parquet", "a/b/x.parquet"),
        ("https://example.org/x/y.json?z=1", "example.org/x/y.json"),
    ],
)
def test_files_of_the_web_have_their_place(url: str, path: str) -> None:
    assert placed(url) == path


@pytest.mark.parametrize(
    ("task", "field", "expected"),
    [
        ("ruler_qa_hotpot", "datasets", ()),
        ("niah_single_2", "datasets", (("baber/paul_graham_essays", None, "train"),)),
        ("niah_single_2", "nltk", ("punkt_tab",)),
        ("ifeval", "nltk", ("punkt_tab",)),
        ("realtoxicityprompts", "services", ("requests",)),
        ("humaneval", "hub_metrics", ("code_eval",)),
    ],
)
def test_the_code_of_tasks_of_the_harness_has_needs(
    task: str, field: str, expected: tuple[object, ...]
) -> None:
    (only,) = Catalogue().tasks(task)
    assert getattr(code_needs(only.config), field) == expected


def test_files_that_ruler_fetches() -> None:
    (task,) = Catalogue().tasks("ruler_qa_squad")
    hosts = {url.split("/")[2] for url in code_needs(task.config).urls}
    assert hosts == {"rajpurkar.github.io", "huggingface.co"}


def test_only_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = Catalogue().tasks("longbench_2wikimqa")
    assert set(needs_of(task).packages) == {
        name for name in ("fuzzywuzzy", "jieba", "rouge") if not is_importable(name)
    }
    monkeypatch.setitem(sys.modules, "jieba", sys)
    assert "jieba" not in needs_of(task).packages


def test_another_release_of_the_harness_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "installed_version", lambda: "0.3")
    with pytest.raises(
        HarnessError, match=r"lm-evaluation-harness 0\.3 is installed.* Fix: pip install lm_eval==0\.4\."
    ):
        check_release()
