from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed: pip install 'apertus[harness]'")

from apertus_model.evaluation.harness.answers import rows_of
from apertus_model.evaluation.harness.collector import Collector, TaskRequests
from apertus_model.evaluation.harness.data import Snapshots
from apertus_model.evaluation.harness.run import evaluate
from apertus_model.evaluation.harness.tasks import HarnessError
from specs.stages.harness import Suite
from tests.apertus_model.evaluation.task_data import write_arc, write_gsm8k, write_wikitext
from tests.snapshots.model import write_model

KINDS = {"arc_easy": "loglikelihood", "gsm8k": "generate_until", "wikitext": "loglikelihood_rolling"}


def test_all_requests_of_a_suite_are_answered_at_once_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    for write in (write_arc, write_gsm8k, write_wikitext):
        write(tmp_path / "data")
    calls: list[list[TaskRequests]] = []

    def answer(asked: list[TaskRequests]) -> list[list[Any]]:
        calls.append(asked)
        own = {
            "loglikelihood": lambda context, text: [-float(len(text)), False],
            "loglikelihood_rolling": lambda text: -float(len(text)),
            "generate_until": lambda context, stated: context[-30:],
        }
        return [[own[some.kind](*one) for one in some.arguments] for some in asked]

    model = Collector(write_model(tmp_path / "model", ["some words"]), True, answer)
    suite = Suite(tasks=[*KINDS], few_shot=1)
    with model.collecting():
        found = evaluate(suite, model, tmp_path, Snapshots(tmp_path / "data", tmp_path / "views"))
    assert [[some.kind for some in asked] for asked in calls] == [[*KINDS.values()]]
    for row in rows_of(found.samples):
        if row["task"] == "arc_easy":
            assert row["log_likelihoods"] == [-float(len(text)) for text in row["continuations"]]
        if row["task"] == "wikitext":
            assert row["log_likelihoods"] == [-float(len(row["prompts"][0]))]
        if row["task"] == "gsm8k":
            assert row["answers"] == [row["prompts"][0][-30:]]


def test_a_chat_template_that_the_tokenizer_lacks_is_a_message(tmp_path: Path) -> None:
    folder = write_model(tmp_path, ["some words"])
    (folder / "chat_template.jinja").unlink()
    Collector(folder, False, lambda asked: [])
    with pytest.raises(HarnessError, match="chat_template is on, and the tokenizer of the model has no chat"):
        Collector(folder, True, lambda asked: [])
