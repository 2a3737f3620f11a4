"""Every task of every shipped recipe is loaded and run on two documents of a snapshot, as its recipe states
it; and a dozen of all kinds in the ordinary tests."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apertus_model.evaluation.answer_classifier import AnswerClassifier
from apertus_model.evaluation.harness.data import Snapshot, Snapshots, snapshot_source
from apertus_model.evaluation.harness.metrics import metric_names
from apertus_model.evaluation.harness.needs import Needs, needs_of
from apertus_model.evaluation.harness.tasks import Catalogue, Task, resolve
from apertus_model.evaluation.sandbox import INSTALL, Sandbox
from apertus_model.files import copy_folder
from infra.store.inputs import list_source
from specs.recipe import load
from specs.stages.evaluate import EvaluateStage
from specs.stages.harness import TASK_FILES, ClassifierSpec, GenerationArguments, HarnessPart, Suite
from tests.apertus_model.rewards.test_classifier import write_classifier
from tests.snapshots.model import write_model
from tests.snapshots.tables import tables
from tests.snapshots.writer import write

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")

ROOT = Path(__file__).parents[4]
OWN = "installed:examples/tasks"
LENGTH = 4096
"""The shortest prompts of `ruler`; the longer ones of recipes would need a model with a longer context."""

GROUPS = {
    "agieval": "acc",
    "arc_multilingual_mean": "acc_norm",
    "bbh_cot_fewshot": "exact_match/get-answer",
    "global_mmlu_full_de": "acc",
    "hellaswag_multilingual_mean": "acc_norm",
    "hendrycks_math": "exact_match",
    "include_base_44_german": "acc",
    "mgsm_en_cot": "exact_match/strict-match",
    "mmlu": "acc",
    "mmlu_stem": "acc",
    "ruler_by_length": f"{LENGTH}",
    "switzerland_qa": "acc",
    "truthfulqa_multilingual_mc2": "acc",
    "xcopa": "acc",
    "xnli": "acc",
}
"""Scores of groups. `mmlu_flan_cot_zeroshot` has none: it aggregates `acc`, which its tasks do not have."""

PLAIN = Suite(
    tasks=[
        "arc_easy",  # multiple choice
        "winogrande",  # multiple choice of contexts
        "xcopa",  # a group with aggregation, of eleven languages
        "include_base_44_german",  # a group of filters of one table
        "wikitext",  # perplexity of documents
        "lambada_openai",  # perplexity of a word
        "truthfulqa_mc2",  # probability of several right answers
        "hendrycks_math_algebra",  # its own scoring
        "switzerland_qa",  # own task files
        "cultural_bench_hard",
        "blend",
    ],
    few_shot=1,
)
CHAT = Suite(
    tasks=[
        "arc_challenge_chat",  # the answer's beginning is stated
        "gsm8k_cot",  # two filters; its own examples
        "arc_challenge_chat_cot",  # own task file, with a pattern for the answer
        "mgsm_en_cot",  # an own group of tasks of the harness, of eleven languages, with two filters
        "drop",  # numbers, spans and dates
    ],
    few_shot=2,
)
WRITTEN = Suite(tasks=["ruler_vt"], sequence_lengths=[LENGTH])


SHIPPED = (
    *(f"evaluate-base/{name}" for name in ("general", "knowledge")),
    "evaluate-long/ruler",
    *(f"evaluate-instruct/{count}-shot" for count in ("zero", "two", "three", "five", "six", "eight")),
    *(f"evaluate-instruct/{name}" for name in ("ruler", "humaneval", "mbpp", "toxicity")),
    *(f"evaluate/{count}-shot" for count in ("zero", "one", "three", "five")),
    *(f"evaluate-{model}/{name}" for model in ("before", "after", "chat") for name in ("medical", "truth")),
)


@functools.cache
def shipped() -> dict[str, tuple[Suite, bool]]:
    """Suites of all shipped recipes by `<stage>/<suite>`, of a matrix by its own name, and whether the model
    answers in a conversation."""
    found: dict[str, tuple[Suite, bool]] = {}
    for path in sorted((ROOT / "specs" / "recipes").glob("*.yaml")):
        pipeline = load(path)
        for name, stage in pipeline.stages.items():
            if isinstance(stage, EvaluateStage) and stage.harness:
                family = pipeline.family(name)  # `evaluate` is of fine-tuned models
                for key, suite in stage.harness.suites.items():
                    found.setdefault(f"{family}/{key}", (suite, family in ("evaluate-instruct", "evaluate")))
                    assert found[f"{family}/{key}"][0] == suite, "recipes with other suites of the same name"
    return found


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_folder(OWN, tmp_path_factory.mktemp("tasks"), TASK_FILES)


@pytest.fixture(scope="module")
def catalogue(include: Path) -> Catalogue:
    return Catalogue(include)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    return write_model(tmp_path_factory.mktemp("model"), texts)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import lm_eval.utils

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(lm_eval.utils, "env", lm_eval.utils.env)  # the run replaces it


Samples = dict[str, list[dict[str, Any]]]
Runs = Callable[[Suite, bool], Samples]


@pytest.fixture
def check(catalogue: Catalogue, folder: Path, include: Path, tmp_path: Path) -> Runs:
    """Runs a suite, and looks at what every task reports."""

    def run(suite: Suite, chat: bool) -> Samples:
        from apertus_model.evaluation.harness.model import open_model
        from apertus_model.evaluation.harness.run import evaluate, flat

        tasks = [*chain.from_iterable(resolve(catalogue, suite.tasks).values())]
        data = snapshots(tmp_path / "data", catalogue, tasks)
        short = {"limit": 2, "generation": GenerationArguments(max_gen_toks=4), "max_length": None}
        suite = suite.model_copy(update=short).resolved(chat)
        if suite.sequence_lengths:
            suite = suite.model_copy(update={"sequence_lengths": [LENGTH]})
        if suite.classifier:
            own = write_classifier(tmp_path / "classifier", labels=2, template=None)
            suite = suite.model_copy(update={"classifier": ClassifierSpec(model=str(own), label="LABEL_1")})
        model = open_model(folder, HarnessPart(suite=suite))
        views = Snapshots(data, tmp_path / "views")
        found = evaluate(suite, model, folder, views, include, *scorers(suite))
        metrics = flat(found.results)
        for task in tasks:
            assert len({one["doc_id"] for one in found.samples[task.name]}) == 2, task.name
        known = {*metric_names(suite, tasks)}  # what the plan expects
        assert metrics.keys() <= known
        assert {name for name in known if "_stderr" not in name and not rare(name)} <= metrics.keys()
        for name in suite.tasks:
            if (metric := GROUPS.get(name)) is not None:  # of tasks with two documents each
                own = [metrics[f"{task.name}/{metric}"] for task in tasks if name in task.groups]
                assert metrics[f"{name}/{metric}"] == pytest.approx(sum(own) / len(own), abs=1e-12)
        return found.samples

    return run


def scorers(suite: Suite) -> tuple[Sandbox | None, AnswerClassifier | None]:
    """What reads the answers of a suite that would run code or ask a service."""
    if suite.sandbox is not None and shutil.which("bwrap") is None:
        pytest.skip(f"bubblewrap is not installed: {INSTALL}")
    stated = suite.classifier
    classifier = None if stated is None else AnswerClassifier(Path(stated.model), stated)
    return None if suite.sandbox is None else Sandbox(), classifier


def rare(metric: str) -> bool:
    """Whether two documents may be too few for a metric: those of `bbq` have one kind of bias."""
    return "_bias_score_" in metric


def snapshots(folder: Path, catalogue: Catalogue, tasks: list[Task]) -> Path:
    """The data of tasks; skips where a package is missing. A plan finds all that they read there."""
    needs = [needs_of(task) for task in tasks]
    assert not [one.task for one in needs if one.refusal]
    if packages := sorted({package for one in needs for package in one.packages}):
        pytest.skip(f"{', '.join(packages)} not installed: pip install 'apertus[harness]'")
    subjects = sorted({task.text("dataset_name") for task in catalogue.tasks("mmlu")})
    write(folder, needs, tables(subjects))
    assert [*missing(folder, needs)] == []
    return folder


def missing(folder: Path, needs: list[Needs]) -> Iterator[str]:
    for reads in dict.fromkeys(reads for one in needs for reads in one.reads):
        listing = list_source(snapshot_source(str(folder), reads.dataset))
        if (lacks := Snapshot(listing).missing(reads)) is not None:
            yield f"{reads.dataset}: {lacks}"


def test_a_dozen_tasks_of_all_kinds_run(check: Runs) -> None:
    samples = check(PLAIN, False)
    asked = {task: answers[0]["arguments"][0] for task, answers in samples.items()}
    options = "A. The Rhône\nB. The Rhine\nC. The Ticino\nD. The Inn"
    question = "Which river flows through Basel?"
    how = "Without any explanation, choose only one from the given alphabet choices(e.g., A, B, C)."
    for task, prompt in {
        "switzerland_qa_rm": f"{question}\n{options}\nAnswer:",
        "cultural_bench_hard": f"{question}\nThe Rhône\nAnswer:",
        "blend": f"{question} {how}\n\n{options}\n\nAnswer:",
    }.items():
        assert asked[task][0].endswith(f"\n\n{prompt}")  # after an example
    assert [samples[task][0]["target"] for task in ("switzerland_qa_rm", "blend")] == ["B", 1]


def test_instruct_models_are_asked_in_conversations(check: Runs) -> None:
    samples = check(CHAT, True)
    prompt = samples["arc_challenge_chat"][0]["arguments"][0][0]
    assert prompt.startswith("<|user|>Given the following question")
    assert prompt.endswith("<|end|><|assistant|>The best answer is")
    reasoned = samples["arc_challenge_chat_cot"][0]
    options = reasoned["doc"]["choices"]["text"]
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", options, strict=True))
    assert f"{listed}\n\nReason step by step" in reasoned["arguments"][0][0]
    assert (
        options["ABCD".index(reasoned["target"])]
        == options[reasoned["doc"]["choices"]["label"].index(reasoned["doc"]["answerKey"])]
    )


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("First A, then B.\nAnswer: C", "C"),
        ("Answer: A? No.\n**Answer: (B)**", "B"),
        ("so the answer is D.", "D"),
        ("Answer: All of them", "[invalid]"),
    ],
)
def test_the_letter_of_a_reasoned_answer_is_the_last_one_that_is_called_the_answer(
    answer: str, letter: str, catalogue: Catalogue
) -> None:
    from lm_eval.filters.extraction import RegexFilter

    (task,) = catalogue.tasks("arc_challenge_chat_cot")
    (stated,) = task.config["filter_list"]
    pattern = {name: value for name, value in stated["filter"][0].items() if name != "function"}
    assert RegexFilter(**pattern).apply([[answer]], [{}]) == [[letter]]


@pytest.fixture(scope="module", autouse=True)
def few_words() -> Iterator[None]:
    """RULER sorts all pairs of an adjective and a noun when it is imported: 6 million, for 10 s."""
    import wonderwords

    words = wonderwords.RandomWord()
    few = SimpleNamespace(_categories={kind: found[:50] for kind, found in words._categories.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", lambda: few)
        yield


def test_a_task_writes_its_prompts_with_the_tokenizer(check: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks._yaml_loader import _load_module_with_cache as module_of
    from lm_eval.tasks.ruler import vt_utils as installed

    vt_utils = module_of(Path(str(installed.__file__)))  # the harness loads its own
    write = vt_utils.sys_vartrack_w_noise_random

    def write_few(**stated: Any) -> list[dict[str, Any]]:  # of 500, two are asked
        return list(write(**stated | {"num_samples": min(stated["num_samples"], 2)}))

    monkeypatch.setattr(vt_utils, "sys_vartrack_w_noise_random", write_few)
    check(WRITTEN, False)


@pytest.mark.slow
@pytest.mark.parametrize("suite", SHIPPED)
def test_every_task_of_the_shipped_recipes_runs(suite: str, check: Runs) -> None:
    check(*shipped()[suite])


def test_no_shipped_task_asks_a_service_or_runs_code_outside_a_sandbox(catalogue: Catalogue) -> None:
    assert sorted(shipped()) == sorted(SHIPPED)
    kinds = set()
    for suite, _ in shipped().values():
        for tasks in resolve(catalogue, suite.tasks).values():
            for needs in map(needs_of, tasks):
                kinds |= {(needs.runs_code, needs.classified)}
                assert not needs.refusal
                assert suite.sandbox is not None or not needs.runs_code
                assert suite.classifier is not None or not needs.classified
    assert kinds == {(False, False), (True, False), (False, True)}
    assert {"mmlu", "ruler_by_length", "acp_bench", "humaneval_64_instruct", "realtoxicityprompts"} <= {
        name for suite, _ in shipped().values() for name in suite.tasks
    }
