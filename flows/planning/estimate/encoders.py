"""Counts the work of embedding or scoring documents with a Hugging Face encoder, in the parts `features` and
`scores`.

    FLOPs of a token = 2 (parameters - words x width) + 4 layers x length x width

A document has (bytes of text / `BYTES_PER_TOKEN`) tokens, up to the `max_tokens` that are read; padding is
not counted. The number of documents comes from the stored part, from the source's declaration, or from its
files.
"""

from __future__ import annotations

from typing import NamedTuple

from flows.planning.estimate.corpus_work import BYTES_PER_TOKEN, documents_of, folder_at
from flows.planning.estimate.work import Known, Work
from flows.planning.graph import Node
from infra.store.hugging_face import stored_model
from specs.capabilities import WIDTHS
from specs.stages.classifier import ClassifierPart, Encoder, FeaturesPart
from specs.stages.scores import ScoresPart


class Reading(NamedTuple):
    """The encoder with which a part reads documents, and its settings."""

    url: str  # of the encoder
    max_tokens: int  # of a document
    precision: str | None  # of matrix products; None: as stored


def encoder_work(known: Known, node: Node) -> Work | None:
    """The work of embedding or scoring; None for a part that asks no encoder."""
    reading = _reading(known, node)
    if reading is None:
        return None
    folder = folder_at(known.graph, reading.url)
    model = stored_model(folder.url) if folder is not None else None
    sizes = (model.width, model.vocab_size, model.hidden_size, model.num_hidden_layers) if model else (None,)
    if folder is None or None in sizes:
        return Work(missing="the sizes of the encoder (config.json)")
    width, words, hidden, layers = (size or 0 for size in sizes)
    held = sum(file.size for file in folder.files if file.path.endswith(".safetensors")) / width
    read = documents_of(known.graph, node, BYTES_PER_TOKEN)
    each = read.bytes / max(1, read.number) / BYTES_PER_TOKEN
    tokens, made = min(each, reading.max_tokens), known.manifest(node)
    number = made.metrics.get("documents", read.number) if made is not None else read.number
    operations = 2 * (held - words * hidden) + 4 * layers * tokens * hidden
    return Work(
        requests=number,
        read=number * tokens,
        forward_flops=round(number * tokens * operations),
        source="measured" if made is not None else read.source,
        width=WIDTHS.get(reading.precision or "", width),
    )


def _reading(known: Known, node: Node) -> Reading | None:
    part = node.part
    encoder: Encoder | None = None
    if isinstance(part, FeaturesPart):
        encoder = part.encoder
    elif isinstance(part, ScoresPart) and part.method == "sequence-classifier":
        return Reading(str(part.url), part.max_tokens, None)
    elif isinstance(part, ScoresPart) and part.method == "mlp":
        classifier = known.graph.nodes[node.inputs["classifier"].node or ""].part
        assert isinstance(classifier, ClassifierPart) and isinstance(classifier.training, Encoder)
        encoder = classifier.training
    return Reading(encoder.encoder, encoder.max_tokens, encoder.precision) if encoder is not None else None
