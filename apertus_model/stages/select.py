"""The `select` stage: the best of several checkpoints by a metric.

Artifact: a manifest without files, with the metrics `chosen` (the index of the candidate, from 0), `value`
(its metric) and `value/<name>` of every candidate. Stages that start from it read that checkpoint.

Invariant: the choice is a function of stored numbers. A candidate whose metric is not a finite number (a
training that diverged) is never chosen; one that lacks the metric is an error.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt
from specs.errors import StageError
from specs.stages.select import SelectPart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Compares the candidates and stores the choice. StageError when there is nothing to compare."""
    part = SelectPart.model_validate(attempt.job.spec)
    values = [_value(attempt, part, index) for index in range(len(part.names))]
    chosen = choose(values, part.best)
    for name, value in zip(part.names, values, strict=True):
        progress.log(f"{part.metric} of {name}: {value:.6g}")
    progress.log(f"{part.names[chosen]} is chosen: the {part.best}")
    finite = {
        f"value/{name}": value for name, value in zip(part.names, values, strict=True) if math.isfinite(value)
    }
    attempt.commit(metrics={"chosen": chosen, "value": values[chosen]} | finite)


def choose(values: Sequence[float], best: Literal["lowest", "highest"]) -> int:
    """The index of the first of the best finite values. StageError when there is none."""
    sign = 1 if best == "lowest" else -1
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        raise StageError(
            f"none of the {len(values)} candidates has a finite value: {', '.join(map(str, values))}; lower"
            " their rates"
        )
    return min(finite, key=lambda index: (sign * values[index], index))


def _value(attempt: Attempt, part: SelectPart, index: int) -> float:
    """The metric of a candidate: from its evaluation, or from the facts of the checkpoint."""
    name = part.names[index]
    if f"evaluation:{index}" in attempt.job.inputs:
        metrics: Mapping[str, float] = attempt.input_artifact(f"evaluation:{index}").manifest.metrics
        if part.metric not in metrics:
            raise StageError(
                f"the evaluation of '{name}' has no metric '{part.metric}'; it has"
                f" {', '.join(sorted(metrics))}"
            )
        return float(metrics[part.metric])
    checkpoint = attempt.job.inputs[f"checkpoint:{index}"]
    assert checkpoint.path is not None and checkpoint.step is not None, "the launcher gives folder and step"
    loss = Artifact(attempt.store, checkpoint.path).checkpoint(checkpoint.step).validation_loss(part.metric)
    if loss is None:
        raise StageError(
            f"'{name}' has no {part.metric} at step {checkpoint.step}; let validation.interval divide the"
            " last step, or select by an evaluation"
        )
    return loss
