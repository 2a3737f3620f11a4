"""The `classifier` stage: a classifier of documents, trained on labelled sources; and the
scores that it, or another model, gives.

Each source is read once, into an artifact of its texts or embeddings: another hidden size, percentile or
split embeds nothing again.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from specs.base import Spec, execution, identity, location, option, reference
from specs.errors import FieldPath, Problem
from specs.launch import HeldModel
from specs.scoring import FASTTEXT_CHARACTERS, TOKENS, Label
from specs.sources import SourceSpec, Url
from specs.stages.base import DocumentsPart, Part, only_text
from specs.stages.gates import Gated

CALIBRATION_BINS = 15
"""Bins of equal width of the expected calibration error."""
PER_LABEL = ("documents", "precision", "recall", "auc", "average_precision")
"""Metrics of each label, named `<metric>/<label>`."""
METRICS = ("accuracy", "loss", "calibration_error", "training_documents", "held_out_documents")


class LabelledSource(Spec):
    """The labels of a source: either `label` or `label_column`."""

    label: Label | None = identity(None, description="label of every document of the source")
    label_column: str | None = identity(
        None,
        min_length=1,
        description="column with the label of each document; true and false are labels too",
    )

    def conflicts(self) -> Iterator[str]:
        if (self.label is None) == (self.label_column is None):
            yield "a source has one label, or a column of labels; set label or label_column"


class FastText(Spec):
    """A supervised fastText model (Joulin et al. 2016) with softmax, trained by one thread, so the same
    documents give the same bits on the same kind of CPU. Its file has 4 `dim` (`buckets` + words) bytes."""

    method: Literal["fasttext"] = identity()
    dim: int = identity(100, ge=1, le=10_000)
    epochs: int = identity(5, ge=1)
    lr: float = identity(0.1, gt=0)
    word_ngrams: int = identity(2, ge=1, description="words of the longest n-gram; 2 for FineWeb2-HQ")
    shortest_ngram: int = identity(
        0, ge=0, description="characters of the shortest n-gram inside words; 0: none"
    )
    longest_ngram: int = identity(0, ge=0, description="characters of the longest; 0: none")
    buckets: int = identity(2_000_000, ge=1, le=2**31 - 1, description="hashed n-grams")
    min_count: int = identity(1, ge=1, description="occurrences of a word that is in the vocabulary")
    max_characters: int = identity(
        FASTTEXT_CHARACTERS, ge=1, description="maximum characters read of a document; the rest is cut off"
    )

    def conflicts(self) -> Iterator[str]:
        if self.shortest_ngram > self.longest_ngram or (self.longest_ngram and not self.shortest_ngram):
            yield (
                f"no n-gram has {self.shortest_ngram} to {self.longest_ngram} characters; set both, the"
                " shortest first"
            )


class Encoder(Spec):
    """A frozen Hugging Face encoder, whose last hidden states are averaged over the tokens of a document."""

    encoder: Url = location(
        min_length=1,
        description="folder (any fsspec URL) with config.json, safetensors and tokenizer, such as XLM-R"
        " base; no code of it is run",
    )
    max_tokens: int = identity(
        TOKENS,
        ge=1,
        description="maximum tokens read of a document, with special tokens; the rest is cut off",
    )
    precision: Literal["float32", "bfloat16"] = identity(
        "bfloat16", description="precision of the encoder; its states are averaged in float32"
    )


class Perceptron(Encoder):
    """A layer of `hidden` units with ReLU and dropout, and a softmax layer, on the embeddings of an encoder;
    trained by AdamW on cross-entropy, on the CPU in float32. The defaults are those of FineWeb2-HQ
    (epfml/fineweb2-hq); the toxicity filters of the report have hidden 768, batch_size 64, schedule linear
    and warmup_steps 200 (swiss-ai/pretrain-data, examples/toxicity_filter)."""

    method: Literal["mlp"] = identity()
    hidden: int = identity(256, ge=1)
    dropout: float = identity(0.2, ge=0, lt=1)
    epochs: int = identity(6, ge=1)
    lr: float = identity(3e-4, gt=0)
    weight_decay: float = identity(0.01, ge=0)
    batch_size: int = identity(256, ge=1)
    schedule: Literal["constant", "linear"] = identity(
        "constant", description="linear: to zero over all steps, after the warm-up"
    )
    warmup_steps: int = identity(0, ge=0)


Method = Annotated[FastText | Perceptron, Field(discriminator="method")]


class ClassifierStage(Gated):
    """A classifier of documents, for the filter `score`.

    Metrics, all on held-out documents: `accuracy`; `loss` (cross-entropy); `calibration_error` (expected
    calibration error over 15 bins of equal width); `precision/<label>`, `recall/<label>`, `auc/<label>`,
    `average_precision/<label>` (a label against the others), `documents/<label>`; `reliability` (documents,
    mean confidence and accuracy by bin). With `by_language`, `languages` has those of each language."""

    VERSION: ClassVar[int] = 1
    kind: Literal["classifier"] = identity()
    sources: dict[str, LabelledSource] = reference(
        min_length=1, description="names of the pipeline's `sources:`, and where their labels are"
    )
    training: Method = reference()
    validation: float = identity(
        0.1, gt=0, lt=1, description="share of the documents held out, by a hash of the text"
    )
    balance: bool = identity(
        True,
        description="whether documents of larger classes are left out, by a hash of the text, until all have"
        " as many; before the split, as published",
    )
    percentiles: list[Annotated[float, Field(gt=0, lt=100)]] = identity(
        default_factory=lambda: [90.0, 95.0],
        description="thresholds to store for each label, over all documents and by language: the score above"
        " which the rest lies; filters name them p90, p95",
    )
    language_column: str | None = identity(
        None, min_length=1, description="column with the language, of all sources and of `reference`"
    )
    by_language: bool = option(
        False,
        description="a model for each language, trained on its documents alone, as for FineWeb2-HQ; it scores"
        " documents with that value in a column of the same name, and documents of other languages have no"
        " score (`missing` of the filter)",
    )
    reference: str | None = reference(
        None,
        description="a source without labels whose scores give the percentiles, in place of held-out"
        " documents",
    )
    seed: int = identity(28)
    files_per_task: int = execution(200, ge=1, description="input files per restartable task")

    @field_validator("percentiles")
    @classmethod
    def _each_once(cls, percentiles: list[float]) -> list[float]:
        if len(set(percentiles)) < len(percentiles):
            raise ValueError(f"percentiles {percentiles} lists a percentile twice; list each once")
        return sorted(percentiles)

    def conflicts(self) -> Iterator[str]:
        if self.labels is not None and len(self.labels) < 2:
            yield (
                f"all sources have the label {self.labels[0]}; a classifier needs a second one, or a"
                " label_column"
            )
        if self.by_language and self.language_column is None:
            yield "by_language needs the language of each document; set language_column"
        if self.reference is not None and self.reference in self.sources:
            yield (
                f"reference '{self.reference}' is trained on, so its scores say nothing of other documents;"
                " name a source without labels, or leave it out"
            )

    def source_fields(self) -> dict[str, FieldPath]:
        named: dict[str, FieldPath] = {source: ("sources", source) for source in self.sources}
        return named | ({} if self.reference is None else {self.reference: ("reference",)})

    def source_problems(self, name: str, source: SourceSpec, at: FieldPath) -> Iterator[Problem]:
        return only_text(self, name, source, at)

    @property
    def labels(self) -> list[str] | None:
        """All labels, sorted; None if a column has them."""
        named = [source.label for source in self.sources.values()]
        return None if None in named else sorted({label for label in named if label is not None})

    def metrics(self) -> list[str] | None:
        """The names of the metrics that are numbers; None if a column has the labels."""
        if self.labels is None:
            return None
        return [*METRICS, *(f"{name}/{label}" for label in self.labels for name in PER_LABEL)]


class FeaturesPart(DocumentsPart):
    """The resolved features that a classifier reads of one source. Inputs: `documents`; `encoder` (documents
    outside the store) for embeddings."""

    VERSION: ClassVar[int] = 2
    WORKERS: ClassVar[int] = 1
    encoder: Encoder | None = identity(None, description="None: the texts themselves")
    max_characters: int = identity()
    label_column: str | None = identity(None)
    language_column: str | None = identity(None)

    @property
    def held_model(self) -> HeldModel | None:
        return HeldModel("encoder") if self.encoder is not None else None


class ClassifierPart(Part):
    """The resolved classifier. Inputs: `source:<i>` and `reference` (features)."""

    training: Method = identity()
    labels: list[str | None] = identity(description="label of each source; None: the label is in its column")
    validation: float = identity()
    balance: bool = identity()
    by_language: bool = option(False)
    percentiles: list[float] = identity()
    seed: int = identity()


class ScoresPart(DocumentsPart):
    """The resolved scores of one source by one model, for a filter of a corpus or of conversations. Inputs:
    `documents`; for a classifier stage `classifier` and, with embeddings, `encoder` (documents outside the
    store); else `model` (documents outside the store)."""

    VERSION: ClassVar[int] = 2
    WORKERS: ClassVar[int] = 1
    of: Literal["conversation", "answer"] = option(
        "conversation", description="in conversations: the text that is scored"
    )
    method: Literal["fasttext", "mlp", "sequence-classifier"] = identity()
    label: Label = identity()
    language_column: str | None = option(
        None, description="column that selects the model of a classifier with one model for each language"
    )
    max_tokens: int = option(
        TOKENS, description="maximum tokens that a Hugging Face sequence classifier reads"
    )
    url: str | None = execution(
        None, description="URL of the encoder or the model; None: the stage's fastText file"
    )

    @property
    def held_model(self) -> HeldModel | None:
        role = {"fasttext": None, "mlp": "encoder", "sequence-classifier": "model"}[self.method]
        return HeldModel(role) if role is not None else None
