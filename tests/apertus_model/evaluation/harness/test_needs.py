from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apertus_model.evaluation.harness.needs import NLTK, Needs, Reads, fetch_command, needs_of, placed
from apertus_model.evaluation.harness.tasks import Catalogue, Function, Task

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
    found = [needs_of(one) for one in Catalogue().tasks(task)]
    assert all(one.refusal.startswith(refusal) and bool(one.refusal) is bool(refusal) for one in found)
    assert {one.runs_code for one in found} == {runs_code}


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
    needs = [needs_of(task) for task in Catalogue().tasks("ruler")]
    assert all(one.tokenizer for one in needs)
    names = {name for one in needs for name in one.datasets}
    assert names == {"baber/paul_graham_essays", "namlh2004/hotpotqa", "rajpurkar.github.io", NLTK}
    assert fetch_command(NLTK, needs, "d") == "python -m nltk.downloader -d d/nltk_data punkt_tab"
    assert fetch_command("rajpurkar.github.io", needs, "d/") == (
        "curl -L --create-dirs -o d/rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"
        " https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"
    )
    assert fetch_command("namlh2004/hotpotqa", needs, "d") == (
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
