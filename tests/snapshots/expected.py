"""The names of metrics that a task reports, from its task file."""

from __future__ import annotations

from apertus_model.evaluation.harness.tasks import Function, Task

DEFAULT = {  # of tasks that name no metric
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}


def metric_names(task: Task) -> set[str]:
    """`<task>/<metric>`, or `<task>/<metric>/<filter>` for each filter; without standard errors."""
    metrics = [_name(one["metric"]) for one in task.config.get("metric_list") or []]
    filters = [one["name"] for one in task.config.get("filter_list") or []] or ["none"]
    names = metrics or DEFAULT[task.text("output_type")]
    return {
        f"{task.name}/{metric}" + ("" if kind == "none" else f"/{kind}")
        for metric in names
        for kind in filters
    }


def _name(metric: object) -> str:
    return metric.name.rpartition(".")[2] if isinstance(metric, Function) else str(metric)
