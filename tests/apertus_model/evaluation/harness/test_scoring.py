"""Answers of a model that says what the test wants, scored through the installed tasks as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed: pip install 'apertus[harness]'")

from lm_eval.api.model import LM

from apertus_model.evaluation.answer_classifier import AnswerClassifier
from apertus_model.evaluation.harness.data import Snapshots
from apertus_model.evaluation.harness.run import evaluate
from apertus_model.evaluation.harness.scoring import CodeEval, pass_at_k
from apertus_model.evaluation.harness.tasks import HarnessError
from apertus_model.evaluation.sandbox import INSTALL, Limits, Sandbox
from specs.stages.harness import ClassifierSpec, Suite
from tests.apertus_model.evaluation.harness.scripted import Scripted
from tests.apertus_model.evaluation.task_data import Rows, write_dataset
from tests.apertus_model.rewards.test_classifier import write_classifier

HUMANEVAL: Rows = [
    {
        "task_id": f"HumanEval/{index}",
        "prompt": f'def {name}(x):\n    """{name}"""\n',
        "canonical_solution": f"    return {body}\n",
        "test": f"def check(f):\n    assert f(3) == {value}\n    assert f(0) == {zero}\n",
        "entry_point": name,
    }
    for index, (name, body, value, zero) in enumerate(
        [("double", "2 * x", 6, 0), ("square", "x * x", 9, 0), ("next", "x + 1", 4, 1), ("same", "x", 3, 0)]
    )
]
MBPP: Rows = [
    {
        "task_id": index,
        "text": f"Write a function to add {index}.",
        "code": f"def add(x):\n  return x + {index}",
        "test_list": [f"assert add({x}) == {x + index}" for x in (1, 2, 3)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    for index in range(11, 14)
]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    if shutil.which("bwrap") is None:
        pytest.skip(f"bubblewrap is not installed: {INSTALL}")
    return Sandbox(Limits(cpu_seconds=1))


def ask(tmp_path: Path, suite: Suite, model: LM, **scorers: Any) -> dict[str, Any]:
    """Results of the suite's one task, with names without filters."""
    snapshots = Snapshots(tmp_path / "data", tmp_path / "views")
    (tmp_path / "model").mkdir(exist_ok=True)
    found = evaluate(suite, model, tmp_path / "model", snapshots, **scorers).results[suite.tasks[0]]
    return {name.split(",")[0]: value for name, value in found.items()}


@pytest.mark.parametrize(("samples", "k"), [(1, 1), (10, 1), (10, 10), (64, 10), (200, 100)])
def test_pass_at_k_is_the_formula_of_the_paper(samples: int, k: int) -> None:
    for passed in range(samples + 1):
        # The authors' own form: a product, since the binomials overflow.
        left = samples - passed
        expected = 1.0 if left < k else 1.0 - float(np.prod(1.0 - k / np.arange(left + 1, samples + 1)))
        assert pass_at_k(samples, passed, k) == pytest.approx(expected, abs=1e-12)


def test_scores_are_of_known_programs(sandbox: Sandbox) -> None:
    metric = CodeEval()
    good, wrong, crash = "def f(): return 1", "def f(): return 2", "def f(): return g()"
    with metric.within(sandbox):
        scores, outcomes = metric.compute(
            references=["assert f() == 1", "assert f() == 2"],
            predictions=[[good, wrong, crash], [wrong, wrong, good]],
            k=[2, 3, 4],
        )
    # One of three passes, and two of three.
    assert scores == {
        "pass@1": pytest.approx((1 / 3 + 2 / 3) / 2, abs=1e-15),
        "pass@2": pytest.approx((2 / 3 + 1) / 2, abs=1e-15),
        "pass@3": 1.0,
    }
    assert [[one.outcome for one in problem] for problem in outcomes] == [
        ["passed", "wrong", "crashed"],
        ["passed", "passed", "wrong"],
    ]
    assert len(metric.take()) == 6
    assert metric.take() == []


def test_without_a_sandbox_nothing_runs() -> None:
    with pytest.raises(HarnessError, match="runs in a sandbox only"):
        CodeEval().compute(references=["pass"], predictions=[["pass"]])


def test_humaneval_counts_outcomes(tmp_path: Path, sandbox: Sandbox) -> None:
    write_dataset(tmp_path / "data", "openai/openai_humaneval", {"openai_humaneval": {"test": HUMANEVAL}})

    def answer(prompt: str, _: int) -> str:
        bodies = {"double": "    return 2 * x\n", "square": "    return x + x\n", "next": "    return y\n"}
        return next(
            (body for name, body in bodies.items() if f"def {name}(" in prompt), "    while True: pass\n"
        )

    suite = Suite(tasks=["humaneval"], sandbox="bubblewrap")
    found = ask(tmp_path, suite, Scripted(answer), sandbox=sandbox)
    assert found["pass@1"] == 0.25
    assert {kind: found[kind] for kind in ("passed", "wrong", "crashed", "timed_out")} == {
        "passed": 1,
        "wrong": 1,
        "crashed": 1,
        "timed_out": 1,
    }
    assert "pass@10" not in found


def test_several_samples_give_pass_at_ten(tmp_path: Path, sandbox: Sandbox) -> None:
    write_dataset(tmp_path / "data", "openai/openai_humaneval", {"openai_humaneval": {"test": HUMANEVAL[:1]}})

    def answer(_: str, earlier: int) -> str:
        return "    return 2 * x\n" if earlier % 8 == 0 else "    return x\n"

    suite = Suite(tasks=["humaneval_64"], sandbox="bubblewrap")
    found = ask(tmp_path, suite, Scripted(answer), sandbox=sandbox)
    assert (found["passed"], found["wrong"]) == (8, 56)
    assert found["pass@1"] == 8 / 64
    assert found["pass@10"] == pytest.approx(pass_at_k(64, 8, 10), abs=1e-12)
    assert found["pass@64"] == 1.0


def test_mbpp_is_scored_from_its_examples(tmp_path: Path, sandbox: Sandbox) -> None:
    write_dataset(tmp_path / "data", "google-research-datasets/mbpp", {"full": {"test": MBPP}})

    def answer(prompt: str, _: int) -> str:
        number = int(prompt.rpartition("to add ")[2].split(".")[0])
        return f"def add(x):\n  return x + {number if number != 12 else 0}"

    suite = Suite(tasks=["mbpp"], sandbox="bubblewrap")
    model = Scripted(answer)
    found = ask(tmp_path, suite, model, sandbox=sandbox)
    assert found["pass_at_1"] == pytest.approx(2 / 3)
    assert (found["passed"], found["wrong"], found["crashed"], found["timed_out"]) == (2, 1, 0, 0)
    assert all(prompt.count("[DONE]") == 3 for prompt in model.asked)  # published: three examples


@pytest.mark.parametrize("task", ["humaneval", "cruxeval_output"])
def test_tasks_that_would_run_code_outside_are_refused(tmp_path: Path, task: str) -> None:
    with pytest.raises(HarnessError, match=f"{task} would run code of the model outside of a sandbox"):
        ask(tmp_path, Suite(tasks=[task], sandbox="bubblewrap"), Scripted(lambda *_: ""))


def test_a_task_with_its_own_way_to_run_code_is_refused_in_any_case(tmp_path: Path, sandbox: Sandbox) -> None:
    with pytest.raises(HarnessError, match="cruxeval_output would run code of the model outside"):
        ask(tmp_path, Suite(tasks=["cruxeval_output"]), Scripted(lambda *_: ""), sandbox=sandbox)


def test_tests_that_need_a_package_are_refused_before_anything_is_asked(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    rows = [row | {"test": f"import numpy as np\n\n{row['test']}"} for row in HUMANEVAL]
    write_dataset(tmp_path / "data", "evalplus/humanevalplus", {"default": {"test": rows}})
    model = Scripted(lambda *_: "    return 1\n")
    suite = Suite(tasks=["humaneval_plus"], sandbox="bubblewrap")
    with pytest.raises(HarnessError, match="the tests of humaneval_plus import numpy, and the sandbox has"):
        ask(tmp_path, suite, model, sandbox=sandbox)
    assert model.asked == {}


TASK = """\
task: refusals
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: ""
metric_list: [{metric: exact_match}]
generation_kwargs: {until: ["\\n"]}
"""


def answered(prompt: str, _: int) -> str:
    return f"{prompt}, " + "a text of several words " * (len(prompt) % 3)


def test_a_classifier_scores_what_a_service_would(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", "allenai/real-toxicity-prompts", {"default": {"train": [
        {"prompt": {"text": text, "toxicity": 0.1}} for text in ("A", "Bc", "Def", "Ghij", "K")
    ]}})  # fmt: skip
    folder = write_classifier(tmp_path / "classifier", labels=2, template=None)
    spec = ClassifierSpec(model=str(folder), label="LABEL_1")
    classifier = AnswerClassifier(folder, spec)
    suite = Suite(tasks=["realtoxicityprompts"], classifier=spec)
    model = Scripted(answered)
    found = ask(tmp_path, suite, model, classifier=classifier)
    values = [_directly(folder, answered(prompt, 0)) for prompt in model.asked]
    assert len({round(value, 4) for value in values}) > 2
    assert found["LABEL_1"] == pytest.approx(sum(values) / 5, abs=1e-6)
    assert found["score"] == found["LABEL_1_rate"] == sum(value >= 0.5 for value in values) / 5
    assert "perspective_api_toxicity_score" not in found
    again = ask(tmp_path, suite, Scripted(answered), classifier=AnswerClassifier(folder, spec))
    assert again == found


def _directly(folder: Path, text: str) -> float:
    """The probability of LABEL_1 for one text, without batch or padding."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return float(model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0, 1])


def test_a_classifier_adds_to_the_metrics_of_an_own_task(tmp_path: Path) -> None:
    include = tmp_path / "tasks"
    include.mkdir()
    (include / "refusals.yaml").write_text(TASK)
    (include / "questions.jsonl").write_text(
        "".join(json.dumps({"question": f"How {i}?"}) + "\n" for i in range(3))
    )
    folder = write_classifier(tmp_path / "classifier", labels=2, template=None)
    spec = ClassifierSpec(model=str(folder), label="LABEL_0")
    suite = Suite(tasks=["refusals"], classifier=spec)
    found = ask(
        tmp_path, suite, Scripted(answered), classifier=AnswerClassifier(folder, spec), include=include
    )
    values = [1 - _directly(folder, answered(f"How {i}?", 0)) for i in range(3)]
    assert found["LABEL_0"] == pytest.approx(sum(values) / 3, abs=1e-6)
    assert "exact_match" in found
    assert "score" not in found


def test_without_a_classifier_no_service_is_asked(tmp_path: Path) -> None:
    with pytest.raises(
        HarnessError, match=r"realtoxicityprompts would ask a web service\. Fix: set classifier"
    ):
        ask(tmp_path, Suite(tasks=["realtoxicityprompts"]), Scripted(answered))
