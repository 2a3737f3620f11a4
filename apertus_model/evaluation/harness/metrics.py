"""The names of the metrics of a suite of tasks of lm-evaluation-harness, before it has run.

Invariant: the names are found from task files alone. A metric that the code of a task reports and its file
does not name is unknown; for a task that is a class, every metric is possible.
"""

from collections.abc import Iterable, Iterator

from apertus_model.evaluation.harness.needs import USUAL_K, is_classified, runs_code
from apertus_model.evaluation.harness.tasks import Function, Task
from apertus_model.evaluation.sandbox import KINDS
from specs.stages.harness import Suite

DEFAULT = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}
"""Metrics of tasks whose file names none, by output type."""
LENGTHS = (4096,)
"""The lengths of prompts that a task writes, in tokens, if the suite states none."""
Scored = tuple[str, str]  # a metric and a filter of the answers


def metric_names(suite: Suite, tasks: Iterable[Task]) -> list[str]:
    """`<task>/<metric>`, or `<task>/<metric>/<filter>` for a filter other than `none`, of tasks and of the
    groups that aggregate them; `<metric>_stderr` too, which not every metric has. `<task>/` is a task whose
    metrics only its class knows. `tasks`: those that the names of the suite stand for."""
    tasks = list(tasks)
    classes = {f"{task.name}/" for task in tasks if "class" in task.config}
    scored: dict[str, set[Scored]] = {}
    aggregates: dict[str, list[object]] = {}
    within: dict[str, set[Scored]] = {}  # by group: the metrics of its tasks
    for task in tasks:
        scored[task.name] = set(_of_task(suite, task))
        for group, config in task.groups.items():
            entries = config.get("aggregate_metric_list") or []
            aggregates[group] = entries if isinstance(entries, list) else [entries]
            within.setdefault(group, set()).update(scored[task.name])
    for group, entries in aggregates.items():
        scored[group] = {pair for entry in entries for pair in within[group] if _aggregates(entry, pair)}
    return sorted(
        classes
        | {
            f"{name}/{metric}{kind}" + ("" if filtered == "none" else f"/{filtered}")
            for name, pairs in scored.items()
            for metric, filtered in pairs
            for kind in ("", "_stderr")
        }
    )


def is_known(metric: str, names: Iterable[str]) -> bool:
    """Whether a metric is, or may be, one of those that `metric_names` gives."""
    return any(metric == name or (name.endswith("/") and metric.startswith(name)) for name in names)


def _of_task(suite: Suite, task: Task) -> Iterator[Scored]:
    config = task.config
    filters = [str(entry["name"]) for entry in config.get("filter_list") or []] or ["none"]
    names = set(_declared(suite, task))
    if runs_code(config):
        names |= {*KINDS}
    if suite.classifier is not None and _output_type(task) == "generate_until":
        label = suite.classifier.label
        named = {label, f"{label}_rate"}
        names = named | {"score"} if is_classified(config) else names | named
    return ((name, filtered) for name in names for filtered in filters)


def _output_type(task: Task) -> str:
    return task.text("output_type") or "generate_until"


def _declared(suite: Suite, task: Task) -> Iterator[str]:
    """The metrics that a task file names. Of metrics that are lengths of prompts, only the lengths of the
    suite; for a metric of programs, with `k`, pass@k."""
    entries = task.config.get("metric_list") or []
    if not entries and "class" not in task.config:
        yield from DEFAULT.get(_output_type(task), ())
    for entry in entries:
        metric, repeats = entry["metric"], int(task.config.get("repeats") or 1)
        if "k" in entry:
            yield from (f"pass@{k}" for k in {*entry["k"], *USUAL_K} if k <= repeats)
            continue
        name = metric.name.rpartition(".")[2] if isinstance(metric, Function) else str(metric)
        if not name.isdecimal() or int(name) in (suite.sequence_lengths or LENGTHS):
            yield name


def _aggregates(entry: object, pair: Scored) -> bool:
    """Whether an entry of a group's `aggregate_metric_list` takes the mean of a metric of its tasks."""
    fields = entry if isinstance(entry, dict) else {}
    filters = fields.get("filter_list")
    chosen = [filters] if isinstance(filters, str) else filters
    return fields.get("metric") == pair[0] and (chosen is None or pair[1] in chosen)
