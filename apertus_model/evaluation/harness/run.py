"""Runs a suite of tasks of lm-evaluation-harness on an opened model.

Invariants: nothing is fetched, and templates of tasks are rendered in Jinja's sandbox. Code that a model
wrote runs in a sandbox, or not at all (`scoring.py`). Tasks draw random numbers from
the global generators of Python and NumPy while they load their documents (gpqa shuffles choices, ruler writes
texts), build their requests, or score answers: each draws the same numbers as in a run of the harness's
command line for that task alone.
"""

import contextlib
import functools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from apertus_model.evaluation.answer_classifier import AnswerClassifier
from apertus_model.evaluation.harness.data import Snapshots
from apertus_model.evaluation.harness.needs import check_release, needs_of
from apertus_model.evaluation.harness.scoring import scoring
from apertus_model.evaluation.harness.tasks import Catalogue, HarnessError, resolve
from apertus_model.evaluation.sandbox import Sandbox
from specs.stages.harness import Suite

SEEDS = {"random": 0, "numpy_random": 1234, "torch_random": 1234, "fewshot_random": 1234}
"""The harness's own seeds, which published scores have."""
TEMPLATES = 1024
"""Compiled templates that are kept: a task has a few, and some write one for each document."""


@dataclass(frozen=True)
class Results:
    """The report of the harness."""

    results: dict[str, dict[str, Any]]  # by task and group, then `<metric>,<filter>`
    samples: dict[str, list[dict[str, Any]]]  # by task
    versions: dict[str, Any]  # of the tasks
    higher_is_better: dict[str, bool]  # by metric


def evaluate(
    suite: Suite,
    model: Any,
    folder: Path,
    snapshots: Snapshots,
    include: Path | None = None,
    sandbox: Sandbox | None = None,
    classifier: AnswerClassifier | None = None,
) -> Results:
    """Asks `model` (`lm_eval.api.model.LM`) the questions of a suite with every setting resolved. `folder`:
    the exported model, whose tokenizer some tasks use; `include`: local folder of own task files, to which
    paths in them are relative; `sandbox` and `classifier`: without them, tasks that need them are refused.
    HarnessError for tasks that do not exist, whose data are missing, or that cannot be run."""
    import lm_eval.evaluator
    import lm_eval.utils
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager

    lm_eval.utils.env = _sandboxed(lm_eval.utils.env)
    named = ", ".join(suite.tasks)
    own = [include] if include else []
    catalogue = Catalogue(*own)
    if missing := sorted(name for name in suite.tasks if name not in catalogue):
        where = "the harness or in include" if include else "the harness"
        raise HarnessError(
            f"there is no task {', '.join(missing)} in {where}. Fix: correct its name, or include"
        )
    asking = _check_scored(catalogue, suite, sandbox is not None, classifier is not None)
    drawn = seeds(suite)
    with (
        contextlib.chdir(include or folder),
        snapshots.in_place(),
        own_randomness(drawn["random_seed"], drawn["numpy_random_seed"]),
        scoring(sandbox, classifier, asking),
        mock.patch.object(lm_eval.evaluator, "add_env_info"),  # it lists every package, which takes seconds
    ):
        manager = TaskManager(
            include_path=[*catalogue.folders(suite.tasks), *own],
            include_defaults=False,
            metadata=metadata(suite, folder),
        )
        try:
            report = lm_eval.simple_evaluate(
                model=model,
                tasks=list(suite.tasks),
                num_fewshot=suite.few_shot,
                limit=suite.limit,
                task_manager=manager,
                log_samples=True,
                system_instruction=suite.system_instruction,
                apply_chat_template=bool(suite.chat_template),
                fewshot_as_multiturn=bool(suite.few_shot_as_turns),
                gen_kwargs=suite.generation.stated() if suite.generation else None,
                confirm_run_unsafe_code=sandbox is not None,
                **drawn,
            )
        except KeyError as error:
            raise HarnessError(
                f"the tasks {named} cannot be run: a document has no column {error}."
                " Fix: correct the data set"
            ) from error
        except (OSError, ValueError, TypeError, AssertionError, ImportError, TemplateError) as error:
            raise HarnessError(f"the tasks {named} cannot be run: {type(error).__name__}: {error}") from error
    assert report is not None, "one process"
    higher: dict[str, bool] = {}
    for metrics in report.get("higher_is_better", {}).values():
        higher |= {metric: better for metric, better in metrics.items() if better is not None}
    return Results(report["results"], report["samples"], report.get("versions", {}), higher)


def _sandboxed(environment: Any) -> Any:
    """The harness's environment of templates, in Jinja's sandbox. The harness compiles a template for every
    field of every document; here it is compiled once."""
    from jinja2.sandbox import SandboxedEnvironment

    sandboxed: Any = SandboxedEnvironment(undefined=environment.undefined, keep_trailing_newline=True)
    sandboxed.filters = environment.filters
    sandboxed.from_string = functools.lru_cache(TEMPLATES)(sandboxed.from_string)
    return sandboxed


def _check_scored(catalogue: Catalogue, suite: Suite, sandbox: bool, classifier: bool) -> set[str]:
    """The tasks that would ask a service about answers. HarnessError for tasks that would run code outside of
    a sandbox, or ask that service: what the plan checks, again for the harness that is installed here."""
    check_release()
    needs = [needs_of(task) for tasks in resolve(catalogue, suite.tasks).values() for task in tasks]
    if unsafe := [need.task for need in needs if need.runs_code and (need.refusal or not sandbox)]:
        raise HarnessError(f"{', '.join(unsafe)} would run code of the model outside of a sandbox")
    asking = {need.task for need in needs if need.classified}
    if asking and not classifier:
        raise HarnessError(f"{', '.join(sorted(asking))} would ask a web service. Fix: set classifier")
    return asking


def seeds(suite: Suite) -> dict[str, int]:
    """The seeds of a suite, by the names of the harness's arguments."""
    return {f"{name}_seed": seed if suite.seed is None else suite.seed for name, seed in SEEDS.items()}


def metadata(suite: Suite, folder: Path) -> dict[str, Any]:
    """The settings of tasks that write their prompts: the tokenizer, and the lengths."""
    lengths = {} if suite.sequence_lengths is None else {"max_seq_lengths": list(suite.sequence_lengths)}
    return {"pretrained": str(folder), "tokenizer": str(folder), **lengths}


def flat(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """`{"task": {"acc,none": 0.5, "acc_stderr,none": 0.1}}` -> `{"task/acc": 0.5, "task/acc_stderr": 0.1}`; a
    filter other than `none` stays in the name. Only finite numbers are included, and not the -1 that the
    harness reports for a length of prompts (`ruler/8192`) that was not asked about."""
    metrics: dict[str, float] = {}
    for task, values in sorted(results.items()):
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if metric.isdecimal() and value == -1:
                continue
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


@contextlib.contextmanager
def own_randomness(seed: int, numpy_seed: int) -> Iterator[None]:
    """Within the block, each task of the harness has generators of its own, seeded when it is made."""
    from lm_eval.api.task import ConfigurableTask, Task

    turn: Any = None  # the task whose turn it is
    states: dict[int, Any] = {}  # of the generators of the other tasks

    def give_turn(task: Any, first: bool) -> None:
        nonlocal turn
        if task is turn:
            return
        states[id(turn)] = random.getstate(), np.random.get_state()
        turn = task
        if first:
            random.seed(seed)
            np.random.seed(numpy_seed)
        else:
            state, numpy_state = states[id(task)]
            random.setstate(state)
            np.random.set_state(numpy_state)

    def in_turn(function: Any, *, first: bool) -> Any:
        @functools.wraps(function)  # the harness looks at the arguments of `__init__`
        def called(task: Any, *arguments: Any, **named: Any) -> Any:
            give_turn(task, first)
            return function(task, *arguments, **named)

        return called

    with contextlib.ExitStack() as stack:
        for kind, name in (
            (Task, "__init__"),
            (ConfigurableTask, "__init__"),
            (Task, "build_all_requests"),
            (ConfigurableTask, "process_results"),
        ):
            wrapped = in_turn(getattr(kind, name), first=name == "__init__")
            stack.enter_context(mock.patch.object(kind, name, wrapped))
        yield
