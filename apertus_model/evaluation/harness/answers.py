"""The answers that a model gave to tasks of lm-evaluation-harness: stored as Parquet, and shown to people.

`answers.parquet` has a row for each document of each task and each filter of its answers:

    task, filter       names, as in the metrics
    document           index in the split that is asked about
    prompts            the model's inputs; one for each choice of a multiple-choice question
    continuations      of each prompt, the text whose likelihood was computed; empty for generated answers
    log_likelihoods    of each continuation, in nats
    greedy             of each continuation, whether the model would have generated it
    answers            generated texts, one for each prompt (and repeat); empty otherwise
    filtered           the answers as the filter leaves them, as JSON
    target             the right answer, as JSON
    metrics            the document's contribution to each metric, as JSON: a number for an accuracy,
                       [log-likelihood, words] for a word perplexity

So a metric that is a mean is the mean over its rows; others follow from `metrics` or the answers.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Row = dict[str, Any]
SCHEMA = pyarrow.schema(
    [
        ("task", pyarrow.string()),
        ("filter", pyarrow.string()),
        ("document", pyarrow.int64()),
        ("prompts", pyarrow.list_(pyarrow.string())),
        ("continuations", pyarrow.list_(pyarrow.string())),
        ("log_likelihoods", pyarrow.list_(pyarrow.float64())),
        ("greedy", pyarrow.list_(pyarrow.bool_())),
        ("answers", pyarrow.list_(pyarrow.string())),
        ("filtered", pyarrow.string()),
        ("target", pyarrow.string()),
        ("metrics", pyarrow.string()),
    ]
)
WORST, RANDOM = 3, 3
"""The numbers of answers of a task that are shown to people."""
LONGEST = 2000
"""The number of characters of a text that are shown to people: the end of a prompt, the start of an
answer."""


def rows_of(samples: Mapping[str, Iterable[Mapping[str, Any]]]) -> Iterator[Row]:
    """The rows of `samples` as the harness returns them with `log_samples`."""
    for task in sorted(samples):
        for sample in samples[task]:
            prompts, continuations, likelihoods, greedy, answers = [], [], [], [], []
            for arguments, responses in zip(sample["arguments"], sample["resps"], strict=True):
                prompts.append(str(arguments[0]))
                second = arguments[1] if len(arguments) > 1 else None
                for response in responses:
                    if isinstance(response, str):
                        answers.append(response)
                    elif isinstance(response, tuple | list):
                        likelihoods.append(float(response[0]))
                        greedy.append(bool(response[1]))
                        continuations.append(str(second))
                    else:  # log-likelihood of a whole text
                        likelihoods.append(float(response))
            yield {
                "task": task,
                "filter": sample["filter"],
                "document": int(sample["doc_id"]),
                "prompts": prompts,
                "continuations": continuations,
                "log_likelihoods": likelihoods,
                "greedy": greedy,
                "answers": answers,
                "filtered": _json(sample["filtered_resps"]),
                "target": _json(sample["target"]),
                "metrics": _json({name: sample[name] for name in sample["metrics"]}),
            }


def _json(value: Any) -> str:
    def plain(other: Any) -> Any:
        if hasattr(other, "tolist"):
            return other.tolist()  # from NumPy
        return sorted(other, key=str) if isinstance(other, set | frozenset) else str(other)

    return json.dumps(value, ensure_ascii=False, default=plain)


def write_answers(path: Path, rows: list[Row]) -> None:
    """Writes `answers.parquet`."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=SCHEMA), path, compression="zstd")


def read_answers(path: Path) -> list[Row]:
    """The rows of `answers.parquet`, with `filtered`, `target` and `metrics` parsed."""
    rows: list[Row] = pyarrow.parquet.read_table(path, schema=SCHEMA).to_pylist()
    return [row | {name: json.loads(row[name]) for name in ("filtered", "target", "metrics")} for row in rows]


def shown(rows: Iterable[Row], higher: Mapping[str, bool]) -> list[dict[str, Any]]:
    """The worst answers for each task and filter, and others chosen by a hash of their index, for the report.
    `rows`: those of `rows_of`; `higher`: for each metric, whether a larger value is better."""
    tasks: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        tasks[row["task"], row["filter"]].append(row)
    answers = []
    for (task, kind), answered in sorted(tasks.items()):
        metric = _scored(answered[0])
        ranked = sorted(answered, key=lambda row: _score(row, metric, higher.get(metric, True)))
        worst = ranked[:WORST] if metric else []
        drawn = [row for row in sorted(answered, key=_drawn) if row not in worst][:RANDOM]
        for chosen, some in (("worst", worst), ("random", drawn)):
            names = {"task": task, "filter": kind, "chosen": chosen, "metric": metric}
            answers += [names | _shortened(row) for row in some]
    return answers


def _scored(row: Row) -> str:
    """The first metric of a row that is a number; "" if there is none."""
    for name, value in json.loads(row["metrics"]).items():
        if isinstance(value, int | float) or (isinstance(value, list) and value):
            return str(name)
    return ""


def _score(row: Row, metric: str, higher: bool) -> tuple[float, int]:
    value = json.loads(row["metrics"]).get(metric, 0.0)
    if isinstance(value, list):  # (log-likelihood, weight): ranked by the log-likelihood of a unit of text
        value = float(value[0]) / max(float(value[1]), 1.0) if len(value) == 2 else 0.0
        higher = True
    number = float(value) if isinstance(value, int | float) else 0.0
    margin = max(row["log_likelihoods"], default=0.0)
    return (number if higher else -number, -int(margin * 1e6) if row["continuations"] else 0)


def _drawn(row: Row) -> str:
    return hashlib.sha256(f"{row['task']}/{row['document']}".encode()).hexdigest()


def _shortened(row: Row) -> dict[str, Any]:
    answers = row["answers"] or [
        f"{continuation} ({likelihood:.2f})"
        for continuation, likelihood in zip(row["continuations"], row["log_likelihoods"], strict=False)
    ]
    return {
        "document": row["document"],
        "prompt": row["prompts"][0][-LONGEST:],
        "answers": [text[:LONGEST] for text in answers[:8]],
        "filtered": row["filtered"][:LONGEST],
        "target": row["target"][:LONGEST],
        "metrics": row["metrics"][:LONGEST],
    }
