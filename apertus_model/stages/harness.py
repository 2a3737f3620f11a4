"""The `harness` part: a suite of tasks of lm-evaluation-harness (an extra) on an exported model, from local
files only.

Artifact: `results.json`, the harness's report per task, and its version; `answers.parquet`, every answer
(`apertus_model.evaluation.harness.answers`); `shown.json`, some of them for people. Metrics:
`<task>/<metric>`, and `<task>/<metric>_stderr`.

Invariant: nothing is fetched and task files run no code: YAML tags (`!function`) are refused before the
harness sees them, templates are rendered in Jinja's sandbox, only data is copied from `include`, and data
sets are read without their code. Code that a model wrote runs in a sandbox, or not at all.
"""

from __future__ import annotations

import os
from typing import Any

from apertus_model.evaluation.answer_classifier import AnswerClassifier
from apertus_model.evaluation.harness.answers import asked, rows_of, shown, write_answers
from apertus_model.evaluation.harness.data import Snapshots, local_snapshots
from apertus_model.evaluation.harness.run import evaluate, finite, flat
from apertus_model.evaluation.harness.tasks import HarnessError, check_tasks, installed_version
from apertus_model.evaluation.sandbox import Sandbox
from apertus_model.files import copy_folder
from apertus_model.generation import local_folder
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import engine_process
from infra.store import Attempt
from specs.job import Job
from specs.stages.harness import TASK_FILES, HarnessPart

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
DATA = "data:"
"""Begins the role of a data set among the inputs."""


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. HarnessError when the harness is missing, or a task cannot be run; SandboxError or
    RewardError, before the model is loaded, when the suite's sandbox or classifier cannot be opened."""
    part = HarnessPart.model_validate(job.spec)
    os.environ.update(ENVIRONMENT | {"HF_DATASETS_CACHE": str(attempt.workdir / "cache")})
    with engine_process(threads=job.launch.threads or 2):
        try:
            from apertus_model.evaluation.harness.model import open_model
        except ImportError as error:
            raise HarnessError(
                f"lm-evaluation-harness cannot be imported ({error}). Fix: pip install 'apertus[harness]', or"
                " leave harness out"
            ) from error
        include = None
        if part.include is not None:
            include = copy_folder(part.include, attempt.workdir / "tasks", TASK_FILES)
            check_tasks(include)
        names = [role.removeprefix(DATA) for role in job.inputs if role.startswith(DATA)]
        datasets = None
        if names:
            assert part.datasets is not None, "the planner states the folder of data sets"
            datasets = local_snapshots(part.datasets, names, attempt.workdir / "datasets")
        suite = part.suite
        sandbox = None if suite.sandbox is None else Sandbox()
        classifier = (
            None if suite.classifier is None else AnswerClassifier.open(suite.classifier, attempt.workdir)
        )
        folder = local_folder(attempt.input_artifact("model"), attempt.workdir / "model")
        progress.update(0, 1, "evaluations")
        model = open_model(folder, part, job.launch.tensor_parallel)
        snapshots = Snapshots(datasets, attempt.workdir / "views")
        found = evaluate(suite, model, folder, snapshots, include, sandbox, classifier)
    metrics = flat(found.results)
    if not metrics:
        raise HarnessError(f"the tasks {', '.join(part.suite.tasks)} gave no metric")
    rows = list(rows_of(found.samples))
    write_answers(attempt.workdir / "answers.parquet", rows)
    attempt.put(attempt.workdir / "answers.parquet", "answers.parquet")
    attempt.write_json("shown.json", finite({"answers": shown(rows, found.higher_is_better)}))
    attempt.write_json(
        "results.json",
        finite({"lm_eval": installed_version(), "results": found.results, "versions": found.versions}),
    )
    for name, value in metrics.items():
        progress.log(f"{name}: {value:.4g}")
    progress.update(1, 1, "evaluations")
    tokenizer: Any = model
    attempt.commit(metrics=metrics, facts={"asked": asked(rows, tokenizer.tok_encode)})
