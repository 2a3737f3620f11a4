"""Parts of the suites of tasks of an evaluation. Each task and everything that it needs are looked up before
anything starts.

Invariant: torch and the harness are not imported; the task files and the listing of data sets say which tasks
and data exist.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from apertus_model.evaluation.harness.data import CONVERTED, Snapshot, snapshot_source
from apertus_model.evaluation.harness.metrics import metric_names
from apertus_model.evaluation.harness.needs import NLTK, Needs, check_release, fetch_command, needs_of
from apertus_model.evaluation.harness.tasks import (
    Catalogue,
    HarnessError,
    check_tasks,
    installed_version,
    resolve,
)
from apertus_model.evaluation.sandbox import INSTALL
from apertus_model.files import copy_folder
from flows.planning.graph import Input
from flows.planning.parts.builder import Builder, reads, shared
from flows.planning.unavailable import Unavailable, is_local, provisional
from infra.store.inputs import Listing, SourceError
from infra.store.scratch import temporary_folder
from specs.errors import FieldPath, did_you_mean, some_of
from specs.rewards import CLASSIFIER_FILES
from specs.sources import SourceSpec
from specs.stages.evaluate import SUITE, EvaluateStage
from specs.stages.harness import TASK_FILES, Harness, HarnessPart, Suite

EXTRA = "lm-evaluation-harness"
INSTALL_EXTRA = "pip install 'apertus[harness]'"


def add_harness(
    builder: Builder, name: str, stage: EvaluateStage, model: Input, chat: bool
) -> dict[str, Input]:
    """Adds a part for each suite, and returns these as inputs of the evaluation by role. `chat`: whether the
    model has a chat template."""
    harness = stage.harness
    assert harness is not None, "the caller has seen it"
    at: FieldPath = ("stages", name, "harness")
    builder.sampled((*at, "engine"), builder.graph.nodes[model.name], harness.engine)
    own: dict[str, Input] = {}
    if harness.include is not None:
        own["tasks"] = builder.folder(
            f"{name}.tasks", harness.include, TASK_FILES, (*at, "include"), "name a folder with task files."
        )
    suites = {key: suite.resolved(chat) for key, suite in harness.suites.items()}
    for key, suite in suites.items():
        if suite.chat_template and not chat:
            message = "the model has no chat template: it was not trained on conversations"
            fix = "leave chat_template out, or evaluate an instruct model."
            builder.problem((*at, "suites", key, "chat_template"), message, fix)
    needs = _Suites(builder, at, harness, suites)
    inputs = {}
    for key, suite in suites.items():
        part = HarnessPart(**shared(harness, HarnessPart), suite=suite)
        needed = {"model": model, **own}
        if suite.classifier is not None:
            path = (*at, "suites", key, "classifier", "model")
            fix = "name a folder with a sequence classifier of Hugging Face."
            needed["classifier"] = builder.folder(
                f"{name}.{key}.classifier", suite.classifier.model, CLASSIFIER_FILES, path, fix
            )
        needed |= {f"data:{dataset}": data for dataset, data in needs.inputs(key).items()}
        node = builder.node(f"{name}/harness/{key}", name, part, needed, kind="harness")
        if key in needs.metrics:
            builder.suite_metrics[node.name] = [f"{key}/{metric}" for metric in needs.metrics[key]]
            builder.graph.tasks[node.name] = needs.members[key]
        inputs[f"{SUITE}{key}"] = reads(node)
    builder.graph.notes.append(_story(name, suites, needs))
    return inputs


def _story(name: str, suites: dict[str, Suite], needs: _Suites) -> str:
    """A note for the plan on the tasks of each suite."""
    if needs.unknown is not None:
        return (
            f"{name}: {EXTRA} is not installed, so tasks and metrics of the suites {some_of(suites)} are not"
            f" checked; install it: {INSTALL_EXTRA}"
        )
    messages = []
    for key, suite in suites.items():
        count = f"{len(needs.tasks[key])} tasks" if key in needs.tasks else "tasks that are not looked up"
        how = "through the chat template" if suite.chat_template else "as plain text"
        ignoring = [task.task for task in needs.tasks.get(key, []) if task.zero_shot and suite.few_shot]
        without = (
            f", {some_of(ignoring)} without examples (num_fewshot: 0 in the task file)" if ignoring else ""
        )
        tags = needs.tags.get(key)
        means = f", {some_of(tags)} without a mean (a tag; a group in include has one)" if tags else ""
        messages.append(f"'{key}' asks {count} {how}{without}{means}")
    return f"{name}: {', '.join(messages)}"


class _Suites:
    """The tasks of a stage's suites, and the data that they need, looked up. Adds problems to the builder."""

    def __init__(self, builder: Builder, at: FieldPath, harness: Harness, suites: dict[str, Suite]) -> None:
        self.builder, self.at, self.harness = builder, at, harness
        self.tasks: dict[str, list[Needs]] = {}  # by suite
        self.members: dict[str, dict[str, list[str]]] = {}  # by suite: the tasks of each name
        self.metrics: dict[str, list[str]] = {}  # by suite
        self.tags: dict[str, list[str]] = {}  # by suite: names that are tags
        self.data: dict[str, Input] = {}  # by data set
        self.unknown: Input | None = None  # the stand-in when the harness is not installed
        self._unfetched: dict[str, str] = {}  # data set -> what is missing
        if installed_version() is None:
            self.unknown = self._not_installed()
            return
        try:
            check_release()
        except HarnessError as error:
            builder.problem((*at, "suites"), str(error))
            return
        with temporary_folder("harness") as scratch:
            try:
                catalogue = self._catalogue(scratch)
            except HarnessError as error:
                builder.problem((*at, "include"), str(error))
                return
            self._resolve(suites, catalogue)
        self._look_up(sorted({name for task in self._all for name in task.datasets}))
        for key, suite in suites.items():
            self._refuse(key, suite)

    def inputs(self, suite: str) -> dict[str, Input]:
        """The data sets of one suite."""
        if self.unknown is not None:
            return {"?": self.unknown}
        names = {name for task in self.tasks.get(suite, []) for name in task.datasets}
        return {name: self.data[name] for name in sorted(names) if name in self.data}

    @property
    def _all(self) -> list[Needs]:
        return [task for tasks in self.tasks.values() for task in tasks]

    def _not_installed(self) -> Input:
        """A stand-in for the data of unknown tasks, of which no fingerprint can be made."""
        self.builder.graph.unavailable[EXTRA] = Unavailable(
            EXTRA, "it is not installed", (*self.at, "suites"), install=INSTALL_EXTRA
        )
        return Input("external", provisional(SourceSpec(url=EXTRA, format="text")), EXTRA)

    def _catalogue(self, scratch: Path) -> Catalogue:
        """The available tasks, own ones first. HarnessError for own tasks that may not be run."""
        include = self.harness.include
        if include is None or f"{self.at[1]}.tasks" not in self.builder.graph.listings:
            return Catalogue()
        folder = copy_folder(include, scratch / "tasks", ["**/*.yaml"])
        check_tasks(folder)
        return Catalogue(folder)

    def _resolve(self, suites: dict[str, Suite], catalogue: Catalogue) -> None:
        for key, suite in suites.items():
            path = (*self.at, "suites", key, "tasks")
            known = [name for name in suite.tasks if name in catalogue]
            for index, name in enumerate(suite.tasks):
                if name not in catalogue:
                    message = f"{EXTRA} {installed_version()} has no task '{name}'"
                    self.builder.problem((*path, index), message, did_you_mean(name, catalogue.names))
            try:
                tasks = resolve(catalogue, known)
            except HarnessError as error:
                self.builder.problem(path, str(error), "name other tasks.")
                continue
            members = [task for named in tasks.values() for task in named]
            self.members[key] = {name: [task.name for task in named] for name, named in tasks.items()}
            self.tasks[key] = [needs_of(task) for task in members]
            self.metrics[key] = metric_names(suite, members)
            self.tags[key] = [name for name in known if catalogue.is_tag(name)]

    def _look_up(self, names: list[str]) -> None:
        """Looks up the data sets as inputs, and adds one problem for all that are missing."""
        datasets, builder = self.harness.datasets, self.builder
        path: FieldPath = (*self.at, "datasets")
        if datasets is None:
            if names:
                message = f"the tasks read {some_of(names)}, and datasets is not stated"
                builder.problem(self.at, message, "set datasets: FOLDER, and put each at FOLDER/<its name>.")
            return
        for name in names:
            try:
                source = snapshot_source(datasets, name)
            except ValueError as error:
                builder.problem(path, str(error), "name a folder.")
                return
            declared = builder.pipeline.assumed_inputs.covers(source.url)
            if not declared and (missing := self._lacks(name, source)) is not None:
                self._unfetched[name] = missing
                continue
            key = f"{self.at[1]}.datasets.{name}"
            self.data[name] = builder.outside(key, source, path, "correct the url.")
            listing = builder.graph.listings.get(key)
            if declared and listing is not None and (missing := self._incomplete(name, listing)) is not None:
                self._unfetched[name] = missing
        if self._unfetched:
            self._tell(datasets)

    def _lacks(self, name: str, source: SourceSpec) -> str | None:
        """Something that is missing from a data set; None if it is complete."""
        if not self.builder.ask_network and not is_local(source.url):
            return None
        try:
            return self._incomplete(name, self.builder.listing(source))
        except SourceError:
            return "not there"

    def _incomplete(self, name: str, listing: Listing) -> str | None:
        """Something that the tasks need and a data set lacks; None if it is complete."""
        snapshot = Snapshot(listing)
        paths = {file.path for file in listing.files}
        if name == NLTK:
            wanted = sorted({resource for task in self._all for resource in task.nltk})
            lacking = [file for file in wanted if not any(f"/{file}" in f"/{path}" for path in paths)]
            return f"no {', '.join(lacking)}" if lacking else None
        for task in self._all:
            for place in task.files:
                if place.startswith(f"{name}/") and place.removeprefix(f"{name}/") not in paths:
                    return f"no file {place.removeprefix(f'{name}/')}, which {task.task} reads"
            for needed in dict.fromkeys(task.reads):
                if needed.dataset == name and (missing := snapshot.missing(needed)) is not None:
                    return f"{missing} ({task.task})"
        return None

    def _tell(self, datasets: str) -> None:
        """Adds one problem with all data sets to fetch."""
        lines = [f"{name}: {what}" for name, what in self._unfetched.items()]
        commands = [fetch_command(name, self._all, datasets) for name in self._unfetched]
        message = f"{len(lines)} data sets of the tasks are not in {datasets}:\n  " + "\n  ".join(lines)
        fix = "on a machine with a network:\n  " + "\n  ".join(commands)
        fix += f"\n  (with --revision {CONVERTED} where the repository has a loading script in place of data)"
        self.builder.problem((*self.at, "datasets"), message, fix)

    def _refuse(self, key: str, suite: Suite) -> None:
        """Adds problems for tasks that cannot be run, one for each reason."""
        path = (*self.at, "suites", key, "tasks")
        tasks = self.tasks.get(key, [])
        reasons: dict[tuple[str, str], list[str]] = {}
        for task in tasks:
            if task.refusal:
                reasons.setdefault((task.refusal, "leave it out."), []).append(task.task)
            if task.runs_code and suite.sandbox is None:
                why = "it runs the code that the model writes"
                reasons.setdefault((why, "set sandbox: bubblewrap."), []).append(task.task)
            if task.classified and suite.classifier is None:
                why = "it asks a web service about each answer"
                fix = "set classifier: {model: FOLDER, label: LABEL}, a local classifier in its place."
                reasons.setdefault((why, fix), []).append(task.task)
        if suite.sandbox is not None and shutil.which("bwrap") is None:
            self.builder.graph.notes.append(
                f"{self.at[1]}: '{key}' needs bubblewrap where it runs, and this machine has none: {INSTALL}"
            )
        for (why, fix), names in reasons.items():
            self.builder.problem(path, f"{some_of(names)} cannot be run: {why}", fix)
        packages = sorted({package for task in tasks for package in task.packages})
        if packages:
            needing = some_of(task.task for task in tasks if task.packages)
            message = f"{needing} need packages that are not installed: {', '.join(packages)}"
            if any(data.name in self.builder.graph.unavailable for data in self.inputs(key).values()):
                self.builder.graph.notes.append(f"{self.at[1]}: {message}")
            else:
                self.builder.problem(path, message, f"pip install {' '.join(packages)}.")


def suite_of(stage: EvaluateStage, metric: str) -> str | None:
    """The suite that a metric belongs to; None for a metric of no suite."""
    suite = metric.partition("/")[0]
    return suite if stage.harness and suite in stage.harness.suites else None
