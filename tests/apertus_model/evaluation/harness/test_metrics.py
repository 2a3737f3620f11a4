"""Names of metrics before a suite has run; that they are those of a run is shown by
`test_published_tasks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from apertus_model.evaluation.harness.metrics import is_known, metric_names
from apertus_model.evaluation.harness.tasks import Catalogue
from specs.stages.harness import ClassifierSpec, Suite

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")


def names(suite: Suite, *own: Path) -> set[str]:
    """Without standard errors."""
    catalogue = Catalogue(*own)
    tasks = [task for name in suite.tasks for task in catalogue.tasks(name)]
    found = {*metric_names(suite, tasks)}
    assert {name for name in found if "_stderr" in name} == {
        _stderr(name) for name in found if "_stderr" not in name and not name.endswith("/")
    }
    return {name for name in found if "_stderr" not in name}


def _stderr(name: str) -> str:
    task, metric, *kind = name.split("/")
    return "/".join([task, f"{metric}_stderr", *kind])


def test_groups_have_the_metrics_that_they_aggregate() -> None:
    found = names(Suite(tasks=["mmlu"]))
    assert {name for name in found if name.startswith("mmlu_stem/")} == {"mmlu_stem/acc"}
    assert {"mmlu/acc", "mmlu_anatomy/acc"} <= found and "mmlu_anatomy/acc_norm" not in found
    filters = {"strict-match", "flexible-extract"}
    assert names(Suite(tasks=["gsm8k"])) == {f"gsm8k/exact_match/{one}" for one in filters}


def test_lengths_are_those_of_the_suite() -> None:
    task = "niah_single_1"
    assert names(Suite(tasks=[task])) == {f"{task}/4096"}
    assert names(Suite(tasks=[task], sequence_lengths=[8192, 16384])) == {f"{task}/8192", f"{task}/16384"}


def test_what_scores_here_has_its_metrics() -> None:
    run = names(Suite(tasks=["humaneval"], sandbox="bubblewrap"))
    kinds = ("pass@1", "passed", "wrong", "crashed", "timed_out")
    assert run == {f"humaneval/{name}/create_test" for name in kinds}
    judged = Suite(tasks=["realtoxicityprompts"], classifier=ClassifierSpec(model="folder", label="toxic"))
    assert names(judged) == {f"realtoxicityprompts/{name}" for name in ("toxic", "toxic_rate", "score")}


def test_metrics_of_a_class_are_all_possible() -> None:
    found = names(Suite(tasks=["squadv2"]))
    assert found == {"squadv2/"} and is_known("squadv2/HasAns_f1", found) and not is_known("squad/f1", found)
