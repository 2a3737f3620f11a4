"""The `harness` part: tasks of lm-evaluation-harness (an extra) on an exported model, from local files only.

Artifact: `results.json`, the harness's report per task, and its version. Metrics: `<task>/<metric>`, and
`<task>/<metric>_stderr`.

Invariant: nothing is fetched and task files run no code: YAML tags (`!function`) are refused before the
harness sees them, templates are rendered in Jinja's sandbox, only data is copied from `include`, and tasks
that run generated code are not confirmed.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.tokens import TagToken

from apertus_model.files import copy_folder
from apertus_model.generation import local_folder
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import engine_process
from infra.store import Attempt
from specs.errors import StageError
from specs.job import Job
from specs.stages.evaluate import Harness, HarnessPart

TASK_FILES = ["**/*.yaml", "**/*.json", "**/*.jsonl", "**/*.parquet"]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
BATCH = 16


class HarnessError(StageError):
    """The harness is not installed, or a task cannot be run."""


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. HarnessError when the harness is missing, or a task cannot be run."""
    harness = HarnessPart.model_validate(job.spec).harness
    os.environ.update(ENVIRONMENT | {"HF_DATASETS_CACHE": str(attempt.workdir / "datasets")})
    with engine_process(threads=job.launch.threads or 2):
        try:
            import lm_eval
        except ImportError as error:
            raise HarnessError(
                f"lm-evaluation-harness cannot be imported ({error}). Fix: pip install 'apertus[harness]', or"
                " leave harness out"
            ) from error
        include = None
        if harness.include is not None:
            include = copy_folder(harness.include, attempt.workdir / "tasks", TASK_FILES)
            check_tasks(include)
        folder = local_folder(attempt.input_artifact("model"), attempt.workdir / "model")
        progress.update(0, 1, "evaluations")
        results = evaluate(harness, folder, include, job.launch.tensor_parallel)
    metrics = flat(results)
    if not metrics:
        raise HarnessError(f"the tasks {', '.join(harness.tasks)} gave no metric")
    attempt.write_json("results.json", {"lm_eval": lm_eval.__version__, "results": finite(results)})
    for name, value in metrics.items():
        progress.log(f"{name}: {value:.4g}")
    progress.update(1, 1, "evaluations")
    attempt.commit(metrics=metrics)


def check_tasks(folder: Path) -> None:
    """HarnessError for a task file that could name code to run: by a YAML tag, or by including an unchecked
    file."""
    for path in sorted(folder.rglob("*.yaml")):
        name, text = path.relative_to(folder), path.read_text("utf-8", errors="replace")
        try:
            tag = next(
                (token for token in YAML(typ="safe", pure=True).scan(text) if isinstance(token, TagToken)),
                None,
            )
            content = None if tag else YAML(typ="safe", pure=True).load(text)
        except YAMLError as error:
            raise HarnessError(f"task file {name} is not YAML: {error}") from error
        if tag is not None:
            written = "".join(part for part in tag.value if part)
            raise HarnessError(
                f"task file {name}, line {tag.start_mark.line + 1}, has the tag '{written}': tags run code,"
                " and task files may not. Fix: use a template, or prepare the data before"
            )
        included = content.get("include", []) if isinstance(content, dict) else []
        for other in included if isinstance(included, list) else [included]:
            target = (path.parent / str(other)).resolve()
            if target.suffix != ".yaml" or not target.is_relative_to(folder.resolve()):
                raise HarnessError(
                    f"task file {name} includes '{other}'. Fix: include .yaml files of the same folder only"
                )


def evaluate(
    harness: Harness, folder: Path, include: Path | None, gpus: int = 1
) -> dict[str, dict[str, Any]]:
    """Results by task. Paths of data in task files are relative to `include`. With several `gpus` the layers
    are spread over all that this process sees.

    HarnessError for tasks that do not exist, or whose data are missing.
    """
    import lm_eval.utils
    from jinja2 import TemplateError
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    sandbox = SandboxedEnvironment(undefined=lm_eval.utils.env.undefined, keep_trailing_newline=True)
    sandbox.filters = lm_eval.utils.env.filters
    lm_eval.utils.env = sandbox
    manager = TaskManager(include_path=str(include) if include else None)
    if missing := sorted(set(harness.tasks) - set(manager.all_tasks)):
        where = f"the harness or in {harness.include}" if harness.include else "the harness"
        raise HarnessError(f"there is no task {', '.join(missing)} in {where}. Fix: its name, or include")
    with contextlib.chdir(include or folder):
        model = HFLM(
            pretrained=str(folder),
            device="cuda" if torch.cuda.is_available() else "cpu",
            dtype="auto",
            parallelize=gpus > 1,
            batch_size=BATCH,
            trust_remote_code=False,
        )
        try:
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=list(harness.tasks),
                num_fewshot=harness.few_shot,
                limit=harness.limit,
                task_manager=manager,
                log_samples=False,
                bootstrap_iters=1000,
            )
        except (OSError, ValueError, KeyError, TypeError, TemplateError) as error:
            raise HarnessError(
                f"the tasks {', '.join(harness.tasks)} cannot be run: {type(error).__name__}: {error}"
            ) from error
    assert found is not None, "one process"
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def flat(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """`{"task": {"acc,none": 0.5, "acc_stderr,none": 0.1}}` -> `{"task/acc": 0.5, "task/acc_stderr": 0.1}`; a
    filter other than `none` stays in the name. Only finite numbers are included."""
    metrics: dict[str, float] = {}
    for task, values in sorted(results.items()):
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if comma and isinstance(value, (int, float)) and math.isfinite(value):
                metrics[f"{task}/{metric}" if kind == "none" else f"{task}/{metric}/{kind}"] = float(value)
    return metrics


def finite(value: Any) -> Any:
    """The document with null for NaN and infinities, and text for values that JSON does not have."""
    if isinstance(value, dict):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)
