"""Documents and conversations of any length, and what one worker makes of them, for measurements."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from pydoc_data import topics
from random import Random
from typing import Any

from apertus_model.progress import Progress
from apertus_model.stages import conversations, corpus, tokenizer
from apertus_model.stop import StopSignal
from infra.store import Attempt, Store
from infra.store.documents import Unit
from specs.job import InputRef, Job

WORDS = 12
"""Of a line."""
BYTES_PER_WORD = 6.7
VOCABULARY = 32_000


def texts(count: int, characters: int, seed: int = 0) -> Iterator[str]:
    """Documents of half to one and a half times `characters`: words with the frequencies of Python's own
    manual."""
    words = " ".join(topics.topics.values()).split()
    random = Random(seed)
    for _ in range(count):
        drawn = random.choices(words, k=max(1, int(characters * random.uniform(0.5, 1.5) / BYTES_PER_WORD)))
        yield "\n".join(" ".join(drawn[begin : begin + WORDS]) for begin in range(0, len(drawn), WORDS))


Row = dict[str, Any]


def document(number: int, text: str) -> Row:
    """With all columns that filters read."""
    row = {"id": str(number), "text": text, "url": f"https://site-{number}.example/page", "score": 1.0}
    return row | {"license": "CC0-1.0", "language": "de", "toxic_score": 0.1}


def conversation(number: int, text: str) -> Row:
    """A question of a quarter of the text, answered by the rest."""
    parts = (("user", text[: len(text) // 4]), ("assistant", text[len(text) // 4 :]))
    return {"id": str(number), "messages": [{"role": role, "content": part} for role, part in parts]}


def write(
    folder: Path, texts: Iterable[str], per_file: int, row: Callable[[int, str], Row] = document
) -> None:
    """Rows of JSON, so many to a file."""
    folder.mkdir()
    rows = enumerate(texts)
    for file in range(10**6):
        lines = [json.dumps(row(number, text)) + "\n" for number, text in islice(rows, per_file)]
        if not lines:
            return
        (folder / f"{file:05d}.jsonl").write_text("".join(lines))


def source(folder: Path) -> dict[str, Any]:
    return {"url": str(folder), "format": "jsonl", "include": ["*.jsonl"], "id_column": "id"}


def conversations_spec(folder: Path) -> dict[str, Any]:
    chats = {"url": str(folder), "format": "chat", "include": ["*.jsonl"]}
    return {"source": chats, "process": {"holdout": 0.1}, "seed": 28, "files_per_task": 1}


def corpus_spec(folder: Path, filters: list[dict[str, Any]], *, pii: bool, **fields: Any) -> dict[str, Any]:
    process = {"filters": filters, "pii": pii, "examples": False}
    return {"source": source(folder), "process": process, "seed": 28, "files_per_task": 1, **fields}


def make_tokenizer(store: Store, folder: Path, documents: Path) -> None:
    """Stores the tokenizer of all corpora of a store."""
    spec = {"sources": [source(documents)], "vocab_size": VOCABULARY, "bytes_per_source": 5_000_000}
    run(store, folder, "tokenizer", "tokenizer", spec)


class Timed(Attempt):
    """Notes when the last task on files has ended, in seconds of the processor."""

    tasks_ended = 0.0

    def commit_unit(self, key: str, **fields: Any) -> Unit:
        unit = super().commit_unit(key, **fields)
        if key.startswith(("documents", "conversations")):
            self.tasks_ended = processor_time()
        return unit


def run(store: Store, folder: Path, kind: str, name: str, spec: dict[str, Any]) -> tuple[float, float]:
    """Runs a stage in this process; seconds of the processor for its tasks, and for what follows."""
    attempt = Timed(_job(store, folder, kind, name, spec))
    attempt.begin()
    begun = processor_time()
    module: Any = {"tokenizer": tokenizer, "corpus": corpus, "conversations": conversations}[kind]
    module.run(attempt, Progress(None), StopSignal())
    return attempt.tasks_ended - begun, processor_time() - attempt.tasks_ended


def _job(store: Store, folder: Path, kind: str, name: str, spec: dict[str, Any]) -> Job:
    input_ = InputRef(kind="tokenizer", fingerprint="tokenizer", path="tokenizer/tokenizer")
    scratch = folder / "scratch" / kind / name
    scratch.mkdir(parents=True)
    return Job(
        node=kind,
        kind=kind,
        version=1,
        fingerprint=name,
        spec=spec,
        identity=spec,
        inputs={} if kind == "tokenizer" else {"tokenizer": input_},
        launch={"workers": {"count": 1}},
        store=store.url,
        path=f"{kind}/{name}",
        attempt="first",
        scratch=str(scratch),
        progress="",
    )


def processor_time() -> float:
    """Seconds of this process, its threads and its finished children."""
    return sum(os.times()[:4])
