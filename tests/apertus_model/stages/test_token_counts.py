"""Folders of tokenizers that cannot be counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.store import Artifact
from infra.store.inputs import SourceError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read tokenizer\.json of the tokenizer folder .*: FileNotFoundError"),
        ("{", r"tokenizer\.json of the tokenizer folder .* cannot be read"),
        ('{"model": {"type": "Unheard"}}', r"tokenizer\.json of the tokenizer folder .* cannot be read"),
    ],
)  # fmt: skip
def test_a_folder_without_a_usable_tokenizer_is_named(
    bench: Any, text: Artifact, tmp_path: Path, content: str | None, message: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(SourceError, match=message):
        bench.run("token_counts", "bad", {"path": str(folder)}, {"text": text})
