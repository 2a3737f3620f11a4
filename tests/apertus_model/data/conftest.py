"""What filters say of a text, and the corpus that other sources have to equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document
from pydantic import TypeAdapter

from apertus_model.data.corpora.filters import Drop, make_check
from infra.store import Artifact
from specs.filters import FilterSpec
from tests.apertus_model.data.sources import corpus_of


@pytest.fixture
def expected(bench: Any, documents: Path, tokenizer: Artifact) -> Artifact:
    """The corpus of the sixty text files."""
    return bench.run("corpus", "expected", corpus_of(documents, "text"), {"tokenizer": tokenizer})


FILTER: TypeAdapter[FilterSpec] = TypeAdapter(FilterSpec)


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Drop | None]:
    """`judge({"filter": ..., ...}, text, column=value, ...)`."""

    def run(spec: dict[str, Any], text: str = "some text", **metadata: Any) -> Drop | None:
        return make_check(FILTER.validate_python(spec), tmp_path)(Document(text, "file/0", metadata=metadata))

    return run
