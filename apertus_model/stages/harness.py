"""The `harness` part: a suite of lm-evaluation-harness (an extra) on an exported model; all files are local.

The stage builds the tasks and commits their requests, workers answer ranges of them, and the harness scores
the answers in the stage.

Artifact: `results.json`, the harness's report per task, and its version; `answers.parquet`, every answer
(`apertus_model.evaluation.harness.answers`); `shown.json`, some of the answers for people. Metrics:
`<task>/<metric>`, and `<task>/<metric>_stderr`.

Invariants:
- Nothing is fetched and task files run no code: YAML tags (`!function`) are refused before the harness sees
  them, templates are rendered in Jinja's sandbox, only data is copied from `include`, and data sets are read
  without their code. Code that a model wrote runs in a sandbox, or not at all.
- With transformers, an answer depends on the requests of its unit and on the seed: neither workers, a
  restart, nor other tasks of the suite change it. vLLM's stored answers are never generated again.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from apertus_model.evaluation.answer_classifier import AnswerClassifier
from apertus_model.evaluation.harness.answers import rows_of, shown, write_answers
from apertus_model.evaluation.harness.data import Snapshots, local_snapshots
from apertus_model.evaluation.harness.run import evaluate, finite, flat, seeds
from apertus_model.evaluation.harness.tasks import HarnessError, check_tasks, installed_version
from apertus_model.evaluation.sandbox import Sandbox
from apertus_model.files import copy_folder
from apertus_model.generation import batch_seed, local_folder
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import prepare_process
from apertus_model.work import Result, run_units
from apertus_model.work.units import units_of
from infra.store import Attempt
from specs.stages.harness import REQUESTS_PER_UNIT, TASK_FILES, HarnessPart

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
DATA = "data:"
"""The prefix of the role of a data set among the inputs."""
ROWS = "rows.jsonl"


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. HarnessError when the harness is missing, or a task cannot be run; SandboxError or
    RewardError, before the model is loaded, when the suite's sandbox or classifier cannot be opened."""
    part = HarnessPart.model_validate(attempt.job.spec)
    os.environ["HF_DATASETS_CACHE"] = str(attempt.workdir / "cache")
    work = Units(attempt)
    try:
        from apertus_model.evaluation.harness.collector import Collector, TaskRequests
    except ImportError as error:
        raise HarnessError(
            f"lm-evaluation-harness cannot be imported ({error}). Fix: pip install 'apertus[harness]', or"
            " leave harness out"
        ) from error
    include = None
    if part.include is not None:
        include = copy_folder(part.include, attempt.workdir / "tasks", TASK_FILES)
        check_tasks(include)
    names = [role.removeprefix(DATA) for role in attempt.job.inputs if role.startswith(DATA)]
    datasets = None
    if names:
        assert part.datasets is not None, "the planner states the folder of data sets"
        datasets = local_snapshots(part.datasets, names, attempt.workdir / "datasets")
    suite = part.suite
    sandbox = None if suite.sandbox is None else Sandbox()
    classifier = AnswerClassifier.open(suite.classifier, attempt.workdir) if suite.classifier else None
    tokens: Counter[str] = Counter(requests=0, read_tokens=0, sampled_tokens=0)

    def answer(asked: list[TaskRequests]) -> list[list[Any]]:
        keys = [work.add(*some) for some in asked]
        units = run_units(work, attempt, stop, progress, processes=part.WORKERS)
        committed = dict(zip(work.units, units, strict=True))
        for unit in committed.values():
            tokens.update(unit.data)
        return [[row for key in some for row in _read(committed[key].files[ROWS])] for some in keys]

    folder = local_folder(attempt.input_artifact("model"), attempt.workdir / "tokenizer", weights=False)
    collector = Collector(folder, bool(suite.chat_template), answer)
    snapshots = Snapshots(datasets, attempt.workdir / "views")
    with collector.collecting():
        report = evaluate(suite, collector, folder, snapshots, include, sandbox, classifier)
    metrics = flat(report.results)
    if not metrics:
        raise HarnessError(f"the tasks {', '.join(part.suite.tasks)} gave no metric")
    rows = list(rows_of(report.samples))
    write_answers(attempt.workdir / "answers.parquet", rows)
    attempt.put(attempt.workdir / "answers.parquet", "answers.parquet")
    attempt.write_json("shown.json", finite({"answers": shown(rows, report.higher_is_better)}))
    attempt.write_json(
        "results.json",
        finite({"lm_eval": installed_version(), "results": report.results, "versions": report.versions}),
    )
    for name, value in metrics.items():
        progress.log(f"{name}: {value:.4g}")
    attempt.commit(metrics=metrics, facts={"asked": dict(tokens)})


class Units:
    """Ranges of the requests of one task and one type, which one opened model answers.

    All requests of a task are committed first, as a unit of their own, so that a worker builds no task. Unit
    names contain the digest of these requests, so that answers to the requests of another harness version are
    not mistaken for answers to these.
    """

    def __init__(self, attempt: Attempt) -> None:
        os.environ.update(ENVIRONMENT)
        prepare_process(attempt.job.launch.cpu_threads)
        self._attempt = attempt
        self._part = HarnessPart.model_validate(attempt.job.spec)
        self.units: dict[str, None] = {}
        self._read: tuple[str, list[Any]] = "", []

    def add(self, kind: str, requests: list[Sequence[Any]]) -> list[str]:
        """Commits requests of one type, and returns the keys of the units that answer them."""
        path = _write(self._attempt.workdir / "requests.jsonl", requests)
        name = f"{kind}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        if self._attempt.unit(f"requests-{name}") is None:
            self._attempt.commit_unit(f"requests-{name}", files={ROWS: path})
        keys = list(units_of(name, len(requests), REQUESTS_PER_UNIT[kind]))
        self.units |= dict.fromkeys(keys)
        return keys

    def run(self, key: str) -> Result:
        from lm_eval.api.instance import Instance

        name, start, stop = key.rsplit("-", 2)
        kind, digest = name.split("-")
        requests = self._requests(f"requests-{name}")[int(start) : int(stop)]
        seed = seeds(self._part.suite)["torch_random_seed"]
        torch.manual_seed(batch_seed(seed, int(digest, 16) + int(start)))
        instances = [Instance(kind, {}, tuple(request), index) for index, request in enumerate(requests)]
        answers = getattr(self._model, kind)(instances)
        path = _write(self._attempt.workdir / f"{key}.jsonl", answers)
        return Result({ROWS: path}, {"requests": len(requests), **self._counted(requests, answers)})

    def _requests(self, unit: str) -> list[Any]:
        """The requests of a task; those read last are kept in memory."""
        if self._read[0] != unit:
            files = self._attempt.unit_files(unit, self._attempt.committed_unit(unit))
            self._read = unit, _read(files[ROWS])
        return self._read[1]

    @cached_property
    def _model(self) -> Any:
        from apertus_model.evaluation.harness.model import open_model

        folder = local_folder(self._attempt.input_artifact("model"), self._attempt.workdir / "model")
        return open_model(folder, self._part, self._attempt.job.launch.tensor_parallel)

    def _counted(self, requests: list[Any], answers: list[Any]) -> dict[str, int]:
        """The numbers of tokens in the requests, and in the answers that are text."""
        tokenizer = self._model.tokenizer

        def tokens(texts: Iterable[Any], *, whole: bool = False) -> int:
            """The number of tokens in texts. A question's choices share its text, which is encoded once."""
            counts = Counter(text for text in texts if isinstance(text, str))
            encoded = tokenizer([*counts], add_special_tokens=whole)["input_ids"] if counts else []
            return sum(len(ids) * number for ids, number in zip(encoded, counts.values(), strict=True))

        continuations = (text for request in requests for text in request[1:])
        total = tokens((request[0] for request in requests), whole=True) + tokens(continuations)
        return {"read_tokens": total, "sampled_tokens": tokens(answers)}


def _write(path: Path, rows: Iterable[Any]) -> Path:
    """Writes a line of JSON for each row, and returns the path. A likelihood may be NaN."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _read(path: Path) -> list[Any]:
    with open(path, "rb") as file:
        return [json.loads(line) for line in file]
