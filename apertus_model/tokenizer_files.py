"""Opens tokenizers: a tokenizer.json by the tokenizers library, a folder by transformers.

Invariant: tokens depend on the text and the vocabulary. What a file states for one use at run time, which may
cut, pad or randomise texts, is set aside, so every tokenizer is opened here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without its run-time state."""
    tokenizer = Tokenizer.from_file(str(path))
    set_state_aside(tokenizer)
    return tokenizer


def open_folder(folder: Path, *, as_written: bool = False) -> Any:
    """The tokenizer of a folder as transformers opens it, without its run-time state; no code of the folder
    is run. `as_written`: exactly that of its tokenizer.json; the class that the folder names may build
    another. Raises errors of many kinds when transformers cannot open it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    opened = PreTrainedTokenizerFast if as_written else AutoTokenizer
    tokenizer = opened.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if tokenizer.is_fast:
        set_state_aside(tokenizer.backend_tokenizer)
    return tokenizer


def set_state_aside(tokenizer: Tokenizer) -> list[str]:
    """Removes the run-time state of a tokenizer. Returns the names of what there was."""
    stated = {
        "truncation": tokenizer.truncation,
        "padding": tokenizer.padding,
        "dropout": getattr(tokenizer.model, "dropout", None),  # of merges, in BPE
    }
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if stated["dropout"] is not None:
        tokenizer.model.dropout = None
    return [name for name, value in stated.items() if value is not None]
