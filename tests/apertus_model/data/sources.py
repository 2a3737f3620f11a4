"""A corpus of a source, and what it has to be."""

from __future__ import annotations

from typing import Any

from infra.store import Artifact


def corpus_of(url: object, kind: str, **source: Any) -> dict[str, Any]:
    return {
        "source": {"url": str(url), "format": kind, **source},
        "process": {"holdout": 0.2, "pii": False},
        "seed": 28,
        "files_per_task": 2,
    }


def files_of(corpus: Artifact) -> dict[str, bytes]:
    """Without the side tables, which have identifiers of documents in their source."""
    names = [name for name in sorted(corpus.manifest.files) if not name.endswith(".documents.parquet")]
    return {name: corpus.bytes(name) for name in names}


def compare(
    bench: Any, name: str, spec: dict[str, Any], tokenizer: Artifact, expected: Artifact, workers: int = 1
) -> None:
    corpus = bench.run("corpus", name, spec, {"tokenizer": tokenizer}, workers=workers)
    assert files_of(corpus) == files_of(expected), name
    assert corpus.manifest.metrics["read"] == expected.manifest.metrics["read"], name
