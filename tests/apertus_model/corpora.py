"""A corpus of sixty documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apertus_model.data.tokens.megatron import TokenFile
from infra.store import Artifact


def corpus_spec(documents: Path, files_per_task: int = 7, **process: Any) -> dict[str, Any]:
    return {
        "source": {"url": str(documents), "format": "text", "include": ["*.txt"]},
        "process": {"holdout": 0.2, **process},
        "seed": 28,
        "files_per_task": files_per_task,
    }


def tokens_of(corpus: Artifact, split: str) -> list[list[int]]:
    file = TokenFile(corpus.local(f"{split}-00000.bin"))
    return [file[i].tolist() for i in range(len(file))]
