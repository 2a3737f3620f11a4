"""What making corpora takes: processor time, bytes that are read and written, storage in between.

    core-seconds = bytes of text x (1 / tokenise + 1 / each filter) + bytes of tokens / shuffle

`RATES` are measured by `python -m benchmarks.corpus_rates`. Sizes come from stored corpora (`measured`), from
what a source declares (`declared`), or from the sizes of its files (`files`): tokens are then estimated with
the stored tokenizer's bytes per token.

Invariants: as for training, a number that depends on an unknown one is None, and what is not counted is
named. Nothing is opened but manifests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from flows.planning.estimate.work import Counter
from flows.planning.graph import Graph, Node
from specs.filters import NearDuplicatesFilter
from specs.sources import COMPRESSED_INSIDE, TOKENISED
from specs.stages.corpus import CorpusPart
from specs.stages.tokenizer import TokenizerPart

RATES = {  # bytes per second of one core: of text, for `shuffle` of tokens
    "tokenise": 2.2e6,  # reading JSONL, too
    "shuffle": 24e6,
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
}
"""Of an Intel Xeon whose other core was busy. `tokenise` includes the hash of every text. The language model
has 256 dimensions and 2,000 labels, about as many as GlotLID's."""
IN_TOKENISE = ("exact-duplicates",)
BYTES_PER_TOKEN = 4.0  # of text, for a tokenizer that is not made yet
TEXT_PER_BYTE = 3.0  # of a compressed file
DOCUMENT_BYTES = 3000  # of text; only signatures are counted by the document
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", *(f".{name}" for name in COMPRESSED_INSIDE))
PASSES = 5
"""Times that the tokens move: written by the tasks, read and written to cells, read and written to shards."""
SIGNATURE_BYTES = 8  # of a bucket
SOURCES = ("measured", "declared", "files")  # of sizes, the least certain last


class Amount(NamedTuple):
    """What a corpus is made of, in bytes."""

    text: float  # that is read
    tokens: float  # that are kept


def core_seconds(amount: Amount, steps: Iterable[str]) -> float:
    """Of one core, for the steps of a corpus: its filters, and `pii`. Those without a rate take nothing."""
    text = sum(1 / RATES[step] for step in ("tokenise", *steps) if step in RATES)
    return amount.text * text + amount.tokens / RATES["shuffle"]


@dataclass(frozen=True)
class PartWork:
    """The work of one part of a corpus."""

    node: Node
    text_bytes: float
    tokens: float
    token_bytes: float
    documents: float
    source: str  # of the sizes, one of `SOURCES`
    tasks: int | None  # None where the files are unavailable
    workers: int | None  # None where the recipe states none: as many as the machine or the cluster runs
    missing: str  # what is not counted

    @property
    def part(self) -> CorpusPart:
        assert isinstance(self.node.part, CorpusPart)
        return self.node.part

    @property
    def core_seconds(self) -> float:
        process = self.part.process
        steps = [step.filter for step in process.filters] + (["pii"] if process.replaced else [])
        return core_seconds(Amount(self.text_bytes, self.token_bytes), steps)

    @property
    def seconds(self) -> float | None:
        """With all workers busy, one core each."""
        return self.core_seconds / self.workers if self.workers is not None else None

    @property
    def signature_bytes(self) -> float:
        steps = self.part.process.filters
        buckets = sum(step.buckets for step in steps if isinstance(step, NearDuplicatesFilter))
        return SIGNATURE_BYTES * buckets * self.documents

    @property
    def moved_bytes(self) -> float:
        """Read and written, the documents and the result included."""
        return self.text_bytes + PASSES * self.token_bytes + 2 * self.signature_bytes

    @property
    def temporary_bytes(self) -> float:
        """Stored at most beside documents and result: tokens on their way, and signatures."""
        return self.token_bytes + self.signature_bytes

    def to_json(self) -> dict[str, Any]:
        """Names as in docs/estimates.md."""
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
    """The work of a corpus stage, or of several."""

    parts: list[PartWork]

    @property
    def seconds(self) -> float | None:
        """The parts one after the other; None where one is unknown."""
        known = [part.seconds for part in self.parts if part.seconds is not None]
        return sum(known) if len(known) == len(self.parts) else None

    @property
    def source(self) -> str:
        """Of the sizes: the least certain."""
        return max((part.source for part in self.parts), key=SOURCES.index)

    @property
    def core_hours(self) -> float:
        return sum(part.core_seconds for part in self.parts) / 3600

    @property
    def missing(self) -> str:
        """What is not counted of some parts."""
        return ", ".join(dict.fromkeys(part.missing for part in self.parts if part.missing))

    def sum(self, name: str) -> int:
        return round(sum(getattr(part, name) for part in self.parts))

    def to_json(self) -> dict[str, Any]:
        """Names as in docs/estimates.md."""
        tasks = [part.tasks for part in self.parts]
        return {
            **{name: self.sum(name) for name in SIZES},
            "core_hours": self.core_hours,
            "tasks": sum(task for task in tasks if task is not None) if None not in tasks else None,
            "seconds": self.seconds,
            "sizes_source": self.source,
            "not_counted": self.missing or None,
            "parts": [part.to_json() for part in self.parts],
        }


def corpora_of(graph: Graph, counter: Counter) -> dict[str, CorpusWork]:
    """By stage, in the order of the plan; work that two parts share is counted with the first."""
    duplicates, found = graph.duplicates(), dict[str, list[PartWork]]()
    for node in graph.nodes.values():
        if isinstance(node.part, CorpusPart) and node.name not in duplicates:
            found.setdefault(node.stage, []).append(_part_work(graph, counter, node))
    return {name: CorpusWork(parts) for name, parts in found.items()}


def corpus_totals(stages: dict[str, CorpusWork]) -> dict[str, Any]:
    """Of all corpora; temporary bytes as if all parts were made at the same time."""
    return {
        "core_hours": sum(work.core_hours for work in stages.values()),
        "corpus_moved_bytes": sum(work.sum("moved_bytes") for work in stages.values()),
        "corpus_temporary_bytes": sum(work.sum("temporary_bytes") for work in stages.values()),
    }


def _part_work(graph: Graph, counter: Counter, node: Node) -> PartWork:
    part = node.part
    assert isinstance(part, CorpusPart)
    tokenizer = graph.nodes[node.inputs["tokenizer"].node or ""]
    per_token, missing = _bytes_per_token(counter, tokenizer), []
    name = node.inputs["documents"].name
    listing, made = graph.listings.get(name), counter.manifest(node)
    width = 2 if isinstance(tokenizer.part, TokenizerPart) and tokenizer.part.vocab_size < 65_500 else 4
    read = made.metrics.get("read") if made is not None else None
    documents: float | None = None
    if made is not None and isinstance(read, dict) and {"bytes", "documents"} <= read.keys():
        text, tokens, source = read["bytes"], made.metrics["tokens"], "measured"
        documents = read["documents"]
    elif listing is None:
        declared = part.source.declared
        tokens = declared.tokens.amount if declared is not None and declared.tokens is not None else 0
        documents = declared.documents if declared is not None else None
        text, source = tokens * per_token, "declared"
        missing += ["documents that filters drop"] if part.process.filters else []
    elif part.source.format in TOKENISED:
        tokens = sum(file.size for file in listing.files if file.path.endswith(".bin")) / width
        text, source = 0.0, "files"
        missing.append("reading of tokens")
    else:
        text = sum(
            file.size * (TEXT_PER_BYTE if file.path.endswith(COMPRESSED) else 1) for file in listing.files
        )
        tokens, source = text / per_token, "files"
    missing += [
        f"filter {step.filter}"
        for step in part.process.filters
        if step.filter not in RATES and step.filter not in IN_TOKENISE
    ]
    if part.source.format == "warc" and part.source.html == "trafilatura":
        missing.append("extraction of text from pages")
    size = len(listing.files) if listing is not None and part.source.limit else part.files_per_task
    workers = node.launch.workers.count if node.launch.workers is not None else None
    return PartWork(
        node=node,
        text_bytes=text,
        tokens=tokens,
        token_bytes=tokens * width,
        documents=documents if documents is not None else text / DOCUMENT_BYTES,
        source=source,
        tasks=-(-len(listing.files) // size) if listing is not None else None,
        workers=workers,
        missing=", ".join(missing),
    )


def _bytes_per_token(counter: Counter, tokenizer: Node) -> float:
    """Of the stored tokenizer's own sources."""
    made = counter.manifest(tokenizer)
    found = made.metrics.get("bytes_per_token") if made is not None else None
    return fmean(found) if isinstance(found, list) and found else BYTES_PER_TOKEN
