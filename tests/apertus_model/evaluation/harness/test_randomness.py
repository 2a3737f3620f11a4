"""What a task asks does not depend on the other tasks of its suite. (That it is what the harness's command
line asks is in tests/apertus_model/stages/test_harness.py.)"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed: pip install 'apertus[harness]'")

from lm_eval.api.task import ConfigurableTask

from apertus_model.evaluation.harness.data import Snapshots
from apertus_model.evaluation.harness.run import evaluate, own_randomness
from specs.stages.harness import Suite
from tests.apertus_model.evaluation.harness.scripted import Scripted
from tests.apertus_model.evaluation.task_data import write_gpqa

MAIN, DIAMOND = "gpqa_main_generative_n_shot", "gpqa_diamond_generative_n_shot"


def prompts(folder: Path, name: str, *tasks: str) -> dict[str, list[str]]:
    snapshots = Snapshots(folder / "data", folder / name)
    suite = Suite(tasks=[*tasks], few_shot=0)
    samples = evaluate(suite, Scripted(lambda prompt, before: "(A)"), folder, snapshots).samples
    asked = {task: {one["doc_id"]: one["arguments"][0][0] for one in some} for task, some in samples.items()}
    return {task: [prompts[index] for index in sorted(prompts)] for task, prompts in asked.items()}


def test_a_task_draws_what_it_draws_alone(tmp_path: Path) -> None:
    rows = write_gpqa(tmp_path / "data")
    main = prompts(tmp_path, "first", MAIN)[MAIN]
    assert prompts(tmp_path, "second", DIAMOND, MAIN)[MAIN] == main
    assert prompts(tmp_path, "third", MAIN, DIAMOND)[MAIN] == main
    # The harness shuffles the choices of one row after the other, and seeds Python's generator with 0.
    generator = random.Random(0)
    for prompt, row in zip(main, rows, strict=True):
        choices = [*(row[f"Incorrect Answer {number}"] for number in (1, 2, 3)), row["Correct Answer"]]
        generator.shuffle(choices)
        assert "\n".join(f"({letter}) {text}" for letter, text in zip("ABCD", choices, strict=True)) in prompt


def test_turns_continue_where_a_task_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(self: ConfigurableTask, *_: object) -> tuple[float, float]:
        return random.random(), float(np.random.random())

    monkeypatch.setattr(ConfigurableTask, "__init__", lambda self: None)
    monkeypatch.setattr(ConfigurableTask, "process_results", draws)
    monkeypatch.setattr(ConfigurableTask, "__abstractmethods__", frozenset())
    python, numpy = random.Random(3), np.random.RandomState(4)
    expected = [(python.random(), numpy.random_sample()) for _ in range(2)]
    with own_randomness(3, 4):
        one, two = ConfigurableTask(), ConfigurableTask()
        found = [one.process_results(0, 0), two.process_results(0, 0), one.process_results(0, 0)]
    assert found == [expected[0], expected[0], expected[1]]
