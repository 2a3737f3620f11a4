from __future__ import annotations

from pathlib import Path

import pytest

from apertus_model.evaluation.harness.tasks import (
    Catalogue,
    Function,
    HarnessError,
    check_tasks,
    installed_folder,
    load_config,
    resolve,
)

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
SHIPPED = [
    "arc_easy",
    "mmlu",
    "ruler",
    "bbh_cot_fewshot",
    "truthfulqa_multilingual",
    "agieval",
    "include_base_44_german",
]


def test_a_group_is_its_members_with_the_settings_of_the_group() -> None:
    catalogue = Catalogue()
    assert [task.name for task in catalogue.tasks("arc_easy")] == ["arc_easy"]
    mmlu = catalogue.tasks("mmlu")
    assert len(mmlu) == 57 and [*mmlu[0].groups] == ["mmlu", "mmlu_stem"]
    assert {task.text("dataset_path") for task in mmlu} == {"cais/mmlu"}
    assert len({task.text("dataset_name") for task in mmlu}) == 57
    ruler = catalogue.tasks("ruler")
    assert len(ruler) == 13 and isinstance(ruler[0].config["custom_dataset"], Function)


@pytest.mark.slow
def test_names_and_members_are_those_of_the_harness() -> None:
    from lm_eval.tasks import TaskManager

    catalogue, manager = Catalogue(), TaskManager()
    assert catalogue.names == manager.all_tasks
    for name in SHIPPED:
        entry = manager.task_index[name]
        if entry.yaml_path is not None:
            assert Path(catalogue._files[name]) == entry.yaml_path
    for tag in manager.all_tags:
        assert sorted(set(catalogue._tags[tag])) == sorted(manager.task_index[tag].tags), tag


def test_the_folders_of_a_task_have_all_that_it_includes() -> None:
    catalogue = Catalogue()
    tasks = installed_folder()
    assert catalogue.folders(["arc_easy", "gsm8k"]) == [tasks / "gsm8k", tasks / "arc"]
    assert catalogue.folders(["mmlu"]) == [tasks / "mmlu" / "default"]


def test_own_task_files_come_before_those_of_the_harness(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\ntag: [both]\ninclude: base.txt\n")
    (tmp_path / "base.txt").write_text("dataset_path: json\ntask: base\noutput_type: multiple_choice\n")
    (tmp_path / "arc.yaml").write_text('"task": "arc_easy"\n"dataset_path": "own/arc"\ntag:\n  - both\n')
    (tmp_path / "group.yaml").write_text(
        "group: pair\nnum_fewshot: 2\ntask:\n  - mine\n  - task: arc_easy\n    num_fewshot: 1\n"
        "  - group: inner\n    task: [mine]\n"
    )
    (tmp_path / "broken.yaml").write_text("task: [")
    catalogue = Catalogue(tmp_path)
    assert catalogue.tasks("arc_easy")[0].text("dataset_path") == "own/arc"
    assert catalogue.tasks("mine")[0].config["output_type"] == "multiple_choice"
    assert [task.name for task in catalogue.tasks("both")] == ["arc_easy", "mine"]
    pair = catalogue.tasks("pair")
    assert [(task.name, task.config["num_fewshot"]) for task in pair] == [
        ("mine", 2),
        ("arc_easy", 1),
        ("mine", 2),
    ]
    assert [*pair[2].groups] == ["pair", "pair::inner"]


def test_ambiguous_and_missing_tasks_are_refused_by_name() -> None:
    catalogue = Catalogue()
    with pytest.raises(HarnessError, match="ai2_arc and arc_easy both have the task arc_easy"):
        resolve(catalogue, ["ai2_arc", "arc_easy"])
    with pytest.raises(HarnessError, match="there is no task nothing"):
        catalogue.tasks("nothing")


def test_task_files_that_cannot_be_read_are_messages(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: b.yaml\n")
    (tmp_path / "b.yaml").write_text("include: a.yaml\n")
    with pytest.raises(HarnessError, match="includes itself"):
        load_config(f"{tmp_path}/a.yaml")
    (tmp_path / "c.yaml").write_text("x: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(HarnessError, match="is not YAML"):
        load_config(f"{tmp_path}/c.yaml")
    with pytest.raises(HarnessError, match="cannot read the task file"):
        load_config(f"{tmp_path}/d.yaml")


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
