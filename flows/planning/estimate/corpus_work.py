"""Estimates the work of making corpora, conversations and classifiers: processor time, bytes moved, temporary
storage.

    core-seconds = bytes of text x (1 / tokenise + 1 / each filter) + bytes of tokens / shuffle

for a corpus; for conversations, bytes of text x (1 / conversations + 1 / each filter); for a fastText
classifier, bytes of text / fasttext, or bytes of text x epochs / fasttext-training to train it. The work of
encoders is in `sampling_work`. `RATES` are measured by `python -m benchmarks.corpus_rates`. Sizes come from
stored corpora (`measured`), from what a source declares (`declared`), or from the sizes of its files
(`files`): tokens are then estimated with the stored tokenizer's bytes per token.

Invariants: as for training, a number that depends on an unknown one is None, and what is not counted is
named. Nothing is opened but manifests.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Any, NamedTuple, cast

from flows.planning.estimate.time_and_cost import total
from flows.planning.estimate.work import Known
from flows.planning.graph import Graph, Node
from infra.store.hugging_face import stored_model
from infra.store.inputs import Listing
from specs.filters import NearDuplicatesFilter
from specs.hugging_face_files import Stored
from specs.sources import COMPRESSED_INSIDE, TOKENISED, resolve_url
from specs.stages.base import DocumentsPart
from specs.stages.classifier import ClassifierPart, FastText, ScoresPart
from specs.stages.conversations import ConversationSource, ConversationsPart
from specs.stages.corpus import CorpusPart, CorpusSource
from specs.stages.tokenizer import TokenizerPart

RATES = {  # bytes per second of one core: bytes of text, for `shuffle` bytes of tokens
    "tokenise": 2.2e6,  # includes reading JSONL
    "shuffle": 24e6,
    "conversations": 0.9e6,
    "pii": 10e6,
    "length": 8e9,
    "alphabetic": 24e6,
    "repeated-lines": 300e6,
    "robots": 400e6,
    "toxicity": 4e9,
    "language": 1.4e6,
    "score": 5e9,
    "sample": 400e6,
    "license": 4e9,
    "near-duplicates": 3.6e6,
    "decontaminate": 5e6,
    "fasttext": 10e6,
    "fasttext-training": 5.3e6,
}
"""Measured on an Intel Xeon whose other core was busy. `tokenise` includes the hash of every text,
`conversations` includes rendering, mask and the work of the stage after its tasks. The language model has 256
dimensions and 2,000 labels, about as many as GlotLID's; the classifier has the defaults of its stage, and two
labels. Another Xeon does all but `score` 1.05 to 1.7 times as fast, and makes a corpus in 0.86 of the time
that a plan says."""
PERCEPTRON_FLOPS = 33e9
"""FLOPs per second of one core, in training with the default batch size."""
IN_TOKENISE = ("exact-duplicates",)
BYTES_PER_TOKEN = 4.0  # of text, for a tokenizer that is not made yet
TEXT_PER_BYTE = 3.0  # bytes of text per byte of a compressed file
DOCUMENT_BYTES = 3000  # of text; only signatures are counted by the document
FILE_BYTES = 500e6  # of a file of a declared source, as in the published run (swiss-ai/pretrain-data)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", *(f".{name}" for name in COMPRESSED_INSIDE))
PASSES = 5
"""The number of times that tokens move: written by the tasks, read and written to cells, read and written to
shards."""
CONVERSATION_PASSES = 3
"""The number of times that tokens, mask and text move: written by the tasks, read and written to shards."""
SIGNATURE_BYTES = 8  # per bucket
MASK_BYTES = 1  # per token of a conversation
SOURCES = ("measured", "declared", "files")  # of sizes, the least certain last


class Amount(NamedTuple):
    """The sizes of a corpus, in bytes."""

    text: float  # that is read
    tokens: float  # that are kept


def core_seconds(amount: Amount, steps: Iterable[str]) -> float:
    """The seconds of one core for the steps of a corpus: its filters, and `pii`. Steps without a rate take no
    time."""
    return amount.text * seconds_per_byte("tokenise", *steps) + amount.tokens / RATES["shuffle"]


def seconds_per_byte(*steps: str) -> float:
    """The seconds per byte of text on one core. Steps without a rate take no time."""
    return sum(1 / RATES[step] for step in steps if step in RATES)


@dataclass(frozen=True)
class PartWork:
    """The work of a part that reads documents."""

    node: Node
    core_seconds: float
    text_bytes: float
    source: str  # of the sizes, one of `SOURCES`
    tokens: float = 0
    token_bytes: float = 0  # bytes written: tokens, and for conversations also mask and text
    passes: int = PASSES  # times that `token_bytes` move
    signature_bytes: float = 0
    tasks: int | None = None  # None if the work is not divided into tasks
    missing: str = ""  # what is not counted

    @property
    def workers(self) -> int | None:
        """The number of workers; None if not stated: as many as the machine or the cluster runs."""
        return self.node.launch.worker_count

    @property
    def seconds(self) -> float | None:
        """The seconds with all workers busy, on one core each."""
        return self.core_seconds / self.workers if self.workers is not None else None

    @property
    def moved_bytes(self) -> float:
        """The bytes read and written, including the documents and the result."""
        return self.text_bytes + self.passes * self.token_bytes + 2 * self.signature_bytes

    @property
    def temporary_bytes(self) -> float:
        """The most bytes stored besides documents and result: tokens in transit, and signatures."""
        return self.token_bytes + self.signature_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.node.name,
            **{name: round(getattr(self, name)) for name in SIZES},
            "core_hours": self.core_seconds / 3600,
            "tasks": self.tasks,
            "workers": self.workers,
            "seconds": self.seconds,
            "sizes_source": self.source,
            "not_counted": self.missing or None,
        }


SIZES = ("text_bytes", "tokens", "moved_bytes", "temporary_bytes")


@dataclass(frozen=True)
class CorpusWork:
    """The work of a stage that makes corpora, conversations or a classifier."""

    parts: list[PartWork]

    @property
    def seconds(self) -> float | None:
        """The seconds of the parts, one after the other; None if one is unknown."""
        return total([part.seconds for part in self.parts])

    @property
    def source(self) -> str:
        """The source of the sizes, the least certain of all parts."""
        return max((part.source for part in self.parts), key=SOURCES.index)

    @property
    def core_hours(self) -> float:
        return sum(part.core_seconds for part in self.parts) / 3600

    @property
    def missing(self) -> str:
        """The work of some parts that is not counted."""
        return ", ".join(dict.fromkeys(part.missing for part in self.parts if part.missing))

    def sum(self, name: str) -> int:
        return round(sum(getattr(part, name) for part in self.parts))

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: self.sum(name) for name in SIZES},
            "core_hours": self.core_hours,
            "tasks": total([part.tasks for part in self.parts]),
            "seconds": self.seconds,
            "sizes_source": self.source,
            "not_counted": self.missing or None,
            "parts": [part.to_json() for part in self.parts],
        }


def corpora_of(known: Known) -> dict[str, CorpusWork]:
    """The work by stage, in the order of the plan; work that two parts share is counted with the first."""
    duplicates, stages = known.graph.duplicates, dict[str, list[PartWork]]()
    for node in known.graph.nodes.values():
        if node.name not in duplicates and (work := _part_work(known, node)) is not None:
            stages.setdefault(node.stage, []).append(work)
    return {name: CorpusWork(parts) for name, parts in stages.items()}


def corpus_totals(stages: dict[str, CorpusWork]) -> dict[str, Any]:
    """The totals of all corpora; temporary bytes are counted as if all parts were made at the same time."""
    return {
        "core_hours": sum(work.core_hours for work in stages.values()),
        "corpus_moved_bytes": sum(work.sum("moved_bytes") for work in stages.values()),
        "corpus_temporary_bytes": sum(work.sum("temporary_bytes") for work in stages.values()),
    }


class DocumentSizes(NamedTuple):
    """The documents that a part reads."""

    text: float  # bytes; 0 if only a number of documents is declared
    number: float
    source: str  # one of `SOURCES`

    @property
    def bytes(self) -> float:
        """The bytes of text, estimated by `DOCUMENT_BYTES` if only the number of documents is known."""
        return self.text or self.number * DOCUMENT_BYTES


def documents_of(graph: Graph, node: Node, per_token: float) -> DocumentSizes:
    """The documents of a part, by its source's files or declaration; `per_token`: bytes of text."""
    part = cast(DocumentsPart, node.part)
    listing, declared = graph.listings.get(node.inputs["documents"].name), part.source.declared
    if listing is not None:
        text = sum(
            file.size * (TEXT_PER_BYTE if file.path.endswith(COMPRESSED) else 1) for file in listing.files
        )
        return DocumentSizes(text, text / DOCUMENT_BYTES, "files")
    tokens = declared.tokens.amount if declared is not None and declared.tokens is not None else 0
    number = declared.documents if declared is not None else None
    text = tokens * per_token
    return DocumentSizes(text, number if number is not None else text / DOCUMENT_BYTES, "declared")


def _part_work(known: Known, node: Node) -> PartWork | None:
    """The work of a part; None if it makes no corpus, conversations, classifier or fastText scores."""
    match node.part:
        case CorpusPart():
            return _corpus(known, node, node.part)
        case ConversationsPart():
            return _conversations(known, node, node.part)
        case ScoresPart(method="fasttext"):
            documents = documents_of(known.graph, node, BYTES_PER_TOKEN)
            seconds, tasks = documents.bytes / RATES["fasttext"], _tasks(known, node, node.part, documents)
            return PartWork(node, seconds, documents.bytes, documents.source, tasks=tasks)
        case ClassifierPart():
            return _training(known.graph, node, node.part)
    return None


def _training(graph: Graph, node: Node, part: ClassifierPart) -> PartWork:
    """The work of training a classifier on the documents of its features; `balance` is ignored."""
    features = [graph.nodes[input_.node or ""] for role, input_ in node.inputs.items() if role != "reference"]
    labelled = [documents_of(graph, part_of_source, BYTES_PER_TOKEN) for part_of_source in features]
    text = sum(documents.bytes for documents in labelled)
    number = sum(documents.number for documents in labelled)
    source = max((documents.source for documents in labelled), key=SOURCES.index)
    trained, missing = 1 - part.validation, ""
    if isinstance(part.training, FastText):
        seconds = trained * text * part.training.epochs / RATES["fasttext-training"]
    else:
        width = encoder_at(graph, part.training.encoder).hidden_size
        labels = len({label for label in part.labels if label is not None} or ("yes", "no"))
        weights = (width or 0) * part.training.hidden + part.training.hidden * labels
        seconds = 6 * weights * trained * number * part.training.epochs / PERCEPTRON_FLOPS
        missing = "" if width is not None else "training on embeddings"
    return PartWork(node, seconds, text, source, missing=missing)


def encoder_at(graph: Graph, url: str) -> Stored:
    """The known facts about the model in a folder; empty for a model that is unavailable."""
    return stored_model(resolve_url(url)) if folder_at(graph, url) is not None else Stored()


def folder_at(graph: Graph, url: str) -> Listing | None:
    """The files of a model; None if they are unavailable."""
    return next((listing for listing in graph.listings.values() if listing.url == resolve_url(url)), None)


def _tasks(known: Known, node: Node, part: DocumentsPart, documents: DocumentSizes) -> int:
    listing = known.graph.listings.get(node.inputs["documents"].name)
    text_per_byte = TEXT_PER_BYTE if part.source.format in COMPRESSED_INSIDE else 1
    files = ceil(documents.bytes / (FILE_BYTES * text_per_byte)) if listing is None else len(listing.files)
    return 1 if part.source.limit else ceil(files / part.files_per_task)


def _corpus(known: Known, node: Node, part: CorpusPart) -> PartWork:
    tokenizer, manifest = known.input(node, "tokenizer"), known.manifest(node)
    per_token, width, missing = _bytes_per_token(known, tokenizer), _token_width(tokenizer), []
    listing = known.graph.listings.get(node.inputs["documents"].name)
    metrics = manifest.metrics if manifest is not None else {}
    counts = metrics.get("read")
    if isinstance(counts, dict) and {"bytes", "documents"} <= counts.keys():
        documents = DocumentSizes(counts["bytes"], counts["documents"], "measured")
        tokens = metrics["tokens"]
    elif listing is not None and part.source.format in TOKENISED:
        tokens = sum(file.size for file in listing.files if file.path.endswith(".bin")) / width
        documents = DocumentSizes(0.0, 0.0, "files")
        missing.append("reading of tokens")
    else:
        documents = documents_of(known.graph, node, per_token)
        tokens = documents.text / per_token
        missing += _before_filters(part.process, listing)
    missing += _without_rate(part.process)
    if part.source.format == "warc" and part.source.html == "trafilatura":
        missing.append("extraction of text from pages")
    return PartWork(
        node=node,
        core_seconds=core_seconds(Amount(documents.text, tokens * width), _steps(part.process)),
        text_bytes=documents.text,
        source=documents.source,
        tokens=tokens,
        token_bytes=tokens * width,
        signature_bytes=_signature_bytes(part.process, documents),
        tasks=_tasks(known, node, part, documents),
        missing=", ".join(missing),
    )


def _conversations(known: Known, node: Node, part: ConversationsPart) -> PartWork:
    tokenizer, manifest = known.input(node, "tokenizer"), known.manifest(node)
    per_token = _bytes_per_token(known, tokenizer)
    listing = known.graph.listings.get(node.inputs["documents"].name)
    documents, missing = documents_of(known.graph, node, per_token), _without_rate(part.process)
    measured = manifest.metrics if manifest is not None else {}
    number = measured.get("read", {}).get("conversations")
    if number and measured["conversations"]:  # those read count as long as those kept
        tokens = measured["tokens"]
        text = tokens * per_token * number / measured["conversations"]
        documents = DocumentSizes(text, number, "measured")
    else:
        tokens = documents.bytes / per_token
        missing += _before_filters(part.process, listing)
    return PartWork(
        node=node,
        core_seconds=documents.bytes * seconds_per_byte("conversations", *_steps(part.process)),
        text_bytes=documents.bytes,
        source=documents.source,
        tokens=tokens,
        token_bytes=tokens * (per_token + _token_width(tokenizer) + MASK_BYTES),
        passes=CONVERSATION_PASSES,
        signature_bytes=_signature_bytes(part.process, documents),
        tasks=_tasks(known, node, part, documents),
        missing=", ".join(missing),
    )


Process = CorpusSource | ConversationSource


def _steps(process: Process) -> list[str]:
    """The kinds of work besides reading and tokenising."""
    return [step.filter for step in process.filters] + (["pii"] if process.replaced else [])


def _without_rate(process: Process) -> list[str]:
    names = [step.filter for step in process.filters]
    return [f"filter {name}" for name in names if name not in RATES and name not in IN_TOKENISE]


def _before_filters(process: Process, listing: Listing | None) -> list[str]:
    """Names the work that a declared size leaves out, since it is the size after the filters."""
    return ["documents that filters drop"] if process.filters and listing is None else []


def _signature_bytes(process: Process, documents: DocumentSizes) -> float:
    steps = [step for step in process.filters if isinstance(step, NearDuplicatesFilter)]
    return SIGNATURE_BYTES * sum(step.buckets for step in steps) * documents.number


def _token_width(tokenizer: Node) -> int:
    """Bytes of a stored token."""
    return 2 if cast(TokenizerPart, tokenizer.part).vocab_size < 65_500 else 4


def _bytes_per_token(known: Known, tokenizer: Node) -> float:
    """The mean bytes per token of the stored tokenizer on its own sources, else `BYTES_PER_TOKEN`."""
    manifest = known.manifest(tokenizer)
    means = manifest.metrics.get("bytes_per_token") if manifest is not None else None
    return fmean(means) if isinstance(means, list) and means else BYTES_PER_TOKEN
