"""Folders of tokenizers that cannot be counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.store import Artifact
from specs.errors import StageError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no file .*/folder/tokenizer\.json"),
        ("{", r"the tokenizer .*/folder/tokenizer\.json fails in from_file"),
        ('{"model": {"type": "Unheard"}}', r"the tokenizer .*/folder/tokenizer\.json fails in from_file"),
    ],
)  # fmt: skip
def test_a_folder_without_a_usable_tokenizer_is_named(
    bench: Any, text: Artifact, tmp_path: Path, content: str | None, message: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(StageError, match=message):
        bench.run("token_counts", "bad", {"path": str(folder)}, {"text": text})
