"""Bytes per second and core of the work on a corpus, and the time of a whole corpus beside what a plan says:
`python -m benchmarks.corpus_rates`.

Documents are lines of English words, drawn with the frequencies of Python's own manual. Each kind of work is
measured alone on a part of them; these are the constants of `flows/planning/estimate/corpus_work.py`. Then a
corpus is made of all documents by one worker, with the filters of `FILTERS`, and its time is divided by the
estimate with the constants as they are there. All times are processor time, of all threads and processes.

    --documents   of the corpus, 100,000 by default
    --measured    of each kind of work, 15,000 by default; of a filter a quarter
    --characters  of a document on average, 3,000 by default
    --only        kinds of work that are measured, all by default; `tokenise` and `shuffle` always are. Then
                  no corpus is compared with the plan
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datatrove.data import Document
from pydantic import TypeAdapter

from apertus_model.classifiers import fast_text
from apertus_model.data.corpora.duplicates import MinHash
from apertus_model.data.corpora.filters import make_check
from apertus_model.data.corpora.pii import Replacer
from benchmarks.corpora import (
    conversation,
    conversations_spec,
    corpus_spec,
    make_tokenizer,
    run,
    texts,
    write,
)
from flows.planning.estimate.corpus_work import RATES, Amount, core_seconds
from infra.store import Artifact, Store
from specs.filters import FilterSpec, NearDuplicatesFilter
from specs.stages.classifier import FastText

FILES, LABELS = 20, 2000
FILTERS = ["length", "repeated-lines", "near-duplicates"]
"""Of the whole corpus."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in (("documents", 100_000), ("measured", 15_000), ("characters", 3000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="+", choices=list(RATES), default=list(RATES))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Store.open(str(folder / "store"))
        store.initialise()
        few, all_ = folder / "few", folder / "all"
        write(few, texts(asked.measured, asked.characters), -(-asked.measured // FILES))
        make_tokenizer(store, folder, few)
        rates = measured(store, folder, few, asked.only)
        print(f"{'work':16} {'MB/s of a core':>15} {'in the plan':>12}")
        for work, rate in rates.items():
            print(f"{work:16} {rate / 1e6:15.3g} {RATES[work] / 1e6:12.3g}")
        if set(asked.only) != set(RATES):
            return
        write(all_, texts(asked.documents, asked.characters), -(-asked.documents // FILES))
        spec = corpus_spec(all_, [settings(name, folder) for name in FILTERS], pii=True)
        seconds = sum(run(store, folder, "corpus", "whole", spec))
        metrics = Artifact(store, "corpus/whole").manifest.metrics
        amount = Amount(metrics["read"]["bytes"], metrics["tokens"] * 2)
        estimate = core_seconds(amount, [*FILTERS, "pii"])
        print(
            f"a corpus of {metrics['read']['documents']:,} documents and {metrics['tokens']:,} tokens:"
            f" {seconds:.0f} s of a core, {estimate:.0f} s by the plan, ratio {seconds / estimate:.2f}"
        )


def measured(store: Store, folder: Path, documents: Path, only: list[str]) -> dict[str, float]:
    """Bytes of text per second of a core, by kind of work; of `shuffle`, bytes of tokens."""
    files = sorted(documents.iterdir())
    rows = [json.loads(line) for file in files[: FILES // 4] for line in file.open()]
    size = sum(len(row["text"].encode()) for row in rows)

    def rate(work: Callable[[Document], Any]) -> float:
        held = [Document(text=row["text"], id=row["id"], metadata=dict(row)) for row in rows]
        begun = time.process_time()
        for document in held:
            work(document)
        return size / (time.process_time() - begun)

    warm = folder / "warm"
    write(warm, texts(1000, 500), 50)
    run(store, folder, "corpus", "warm", corpus_spec(warm, [], pii=False))
    tasks, rest = run(store, folder, "corpus", "bare", corpus_spec(documents, [], pii=False))
    metrics = Artifact(store, "corpus/bare").manifest.metrics
    found = {"tokenise": metrics["read"]["bytes"] / tasks, "shuffle": 2 * metrics["tokens"] / rest}
    if "conversations" in only:
        chats = folder / "chats"
        write(chats, (row["text"] for row in rows), -(-len(rows) // FILES), conversation)
        found["conversations"] = size / sum(
            run(store, folder, "conversations", "chats", conversations_spec(chats))
        )
    if "pii" in only:
        replace = Replacer(("email", "ip", "iban"))
        found["pii"] = rate(lambda document: replace(document.text))
    if {"fasttext", "fasttext-training"} & set(only):
        model, spec, begun = folder / "classifier.bin", FastText(method="fasttext"), time.process_time()
        labelled = (("ab"[place % 2], row["text"]) for place, row in enumerate(rows))
        fast_text.train(labelled, spec, 28, folder, model)
        found["fasttext-training"] = size * spec.epochs / (time.process_time() - begun)
        classifier = fast_text.FastTextModel(model, "the classifier")
        found["fasttext"] = rate(lambda document: classifier.probabilities([document.text], ["a"]))
    for name in only:
        if name not in found:
            step = TypeAdapter(FilterSpec).validate_python(settings(name, folder))
            if isinstance(step, NearDuplicatesFilter):
                signer = MinHash(step)
                found[name] = rate(lambda document, signer=signer: signer.signature(document.text))
            else:
                found[name] = rate(make_check(step, folder))
    return found


def settings(name: str, folder: Path) -> dict[str, Any]:
    """A filter that drops nothing."""
    listed = folder / "domains.txt"
    if name == "robots" and not listed.exists():
        listed.write_text("".join(f"site-{number}.example\n" for number in range(1_000_000, 2_000_000)))
    questions = folder / "questions.jsonl"
    if name == "decontaminate" and not questions.exists():
        rows = texts(2000, 200, seed=1)
        questions.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    fields: dict[str, dict[str, Any]] = {
        "length": {"min_characters": 1},
        "alphabetic": {"min_share": 0},
        "repeated-lines": {"max_share": 1},
        "robots": {"domains": str(listed)},
        "score": {"column": "score", "min": 0},
        "sample": {"rate": 1},
        "license": {"allow": ["CC0-1.0"]},
        "toxicity": {"classifier": "benchmark"},
        "decontaminate": {"against": [{"url": str(questions), "format": "jsonl"}], "max_share": 0.99},
    }
    if name == "language":
        fields[name] = {"model": str(language_model(folder)), "languages": ["l1"], "min_score": 0}
    return {"filter": name, **fields.get(name, {})}


def language_model(folder: Path) -> Path:
    """A fastText model of the size of GlotLID's output: 2,000 labels, 256 dimensions, 2- to 5-grams."""
    import fasttext

    path, data = folder / "model.bin", folder / "labelled.txt"
    lines = (f"__label__l{number % LABELS} {text}" for number, text in enumerate(texts(2 * LABELS, 60)))
    data.write_text("\n".join(line.replace("\n", " ") for line in lines))
    fasttext.train_supervised(
        str(data), dim=256, minn=2, maxn=5, bucket=100_000, epoch=1, loss="hs", thread=1, verbose=0
    ).save_model(str(path))
    return path


if __name__ == "__main__":
    main()
