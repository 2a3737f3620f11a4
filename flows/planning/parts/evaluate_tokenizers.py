"""Parts of `evaluate_tokenizers`: parallel text -> counts of each tokenizer -> evaluation.

Another tokenizer adds a part that counts, and reruns none of the existing counts.
"""

from flows.planning.graph import Input, Node
from flows.planning.parts.builder import Builder, numbered, reads, shared
from specs.errors import FieldPath
from specs.stages.evaluate_tokenizers import (
    COUNTS,
    ComparedTokenizer,
    EvaluateTokenizersPart,
    EvaluateTokenizersStage,
    ParallelTextPart,
    TokenCountsPart,
)

TOKENIZER_FILE = "tokenizer.json"


def add_evaluate_tokenizers(builder: Builder, name: str, stage: EvaluateTokenizersStage) -> None:
    text = _text(builder, name, stage)
    inputs = {"text": reads(text)}
    for key, compared in stage.tokenizers.items():
        inputs[f"{COUNTS}{key}"] = reads(_counts(builder, name, key, compared, text))
    against = stage.against or next(iter(stage.tokenizers))
    part = EvaluateTokenizersPart(**shared(stage, EvaluateTokenizersPart) | {"against": against})
    builder.node(name, name, part, inputs)
    for path, metric in builder.stated_metrics(name):
        # languages that the stage does not state are unknown until the text is read
        languages = stage.languages or metric.split("/")[2:3]
        if metric not in part.metrics(stage.tokenizers, languages):
            known = part.metrics(stage.tokenizers, stage.languages or [stage.parity_to])
            builder.unknown_metric(path, name, metric, known)


def _text(builder: Builder, name: str, stage: EvaluateTokenizersStage) -> Node:
    sources = [builder.pipeline.sources[source] for source in stage.sources]
    own = {"sources": sources, "languages": sorted(stage.languages)}
    part = ParallelTextPart(**shared(stage, ParallelTextPart) | own)
    inputs = numbered("source", map(builder.documents, stage.sources))
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
