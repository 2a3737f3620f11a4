"""Parts of `evaluate_tokenizers`: parallel text -> counts of each tokenizer -> evaluation.

Another tokenizer adds a part that counts, and reruns none of the existing counts.
"""

from __future__ import annotations

from typing import cast

from flows.planning.graph import Input, Node
from flows.planning.parts.builder import Builder, reads
from specs.errors import FieldPath, did_you_mean
from specs.stages.evaluate_tokenizers import (
    COUNTS,
    ComparedTokenizer,
    EvaluateTokenizersPart,
    EvaluateTokenizersStage,
    ParallelTextPart,
    TokenCountsPart,
)

TOKENIZER_FILE = "tokenizer.json"


def add_evaluate_tokenizers(builder: Builder, name: str) -> None:
    """Adds the parts of the stage, of which the evaluation is the last."""
    stage = cast(EvaluateTokenizersStage, builder.pipeline.stages[name])
    text = _text(builder, name, stage)
    inputs = {"text": reads(text)}
    for key, compared in stage.tokenizers.items():
        inputs[f"{COUNTS}{key}"] = reads(_counts(builder, name, key, compared, text))
    part = EvaluateTokenizersPart(
        parity_to=stage.parity_to, against=stage.against or next(iter(stage.tokenizers)), seed=stage.seed
    )
    builder.node(name, name, part, inputs)
    for index, gate in enumerate(stage.gates):
        _check_metric(builder, stage, part, gate.metric, ("stages", name, "gates", index, "metric"))
    for metric in stage.reference:
        _check_metric(builder, stage, part, metric, ("stages", name, "reference", metric))


def _text(builder: Builder, name: str, stage: EvaluateTokenizersStage) -> Node:
    part = ParallelTextPart(
        sources=[builder.pipeline.sources[source] for source in stage.sources],
        language_column=stage.language_column,
        languages=sorted(stage.languages),
        lines=stage.lines,
        incomplete=stage.incomplete,
    )
    inputs = {f"source:{index}": builder.documents(source) for index, source in enumerate(stage.sources)}
    return builder.node(f"{name}/text", name, part, inputs, kind="parallel_text")


def _counts(builder: Builder, name: str, key: str, compared: ComparedTokenizer, text: Node) -> Node:
    inputs: dict[str, Input] = {"text": reads(text)}
    if compared.stage is not None:
        inputs["tokenizer"] = builder.part(compared.stage)
    elif compared.path is not None:
        at: FieldPath = ("stages", name, "tokenizers", key, "path")
        fix = f"name a folder with {TOKENIZER_FILE} (a fast tokenizer of Hugging Face)."
        inputs["folder"] = builder.folder(f"{name}.{key}", compared.path, [TOKENIZER_FILE], at, fix)
    part = TokenCountsPart(path=compared.path)
    return builder.node(f"{name}/counts/{key}", name, part, inputs, kind="token_counts")


def _check_metric(
    builder: Builder,
    stage: EvaluateTokenizersStage,
    part: EvaluateTokenizersPart,
    metric: str,
    path: FieldPath,
) -> None:
    """Adds a problem for a metric that the evaluation will not have. Languages that the stage does not state
    are unknown until the text is read."""
    languages = stage.languages or metric.split("/")[2:3]
    if metric not in part.metrics(stage.tokenizers, languages):
        known = part.metrics(stage.tokenizers, stage.languages or [stage.parity_to])
        builder.problem(path, f"'{path[1]}' will not have a metric '{metric}'", did_you_mean(metric, known))
