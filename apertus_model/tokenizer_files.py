"""Opens tokenizers: a tokenizer.json by the tokenizers library, a folder by transformers.

Invariants:
- Tokens depend on the text and the vocabulary. What a file states for one use at run time, which may cut, pad
  or randomise texts, is set aside, so every tokenizer is opened here.
- A file may be a stranger's. What the library raises when it is opened or used, a panic of its Rust code too,
  is a TokenizerError that names the file. A chat template of a folder is rendered within the bounds of
  `apertus_model.template_process`.
"""

import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from tokenizers import Tokenizer

from apertus_model import template_process
from specs.errors import StageError

os.environ["RUST_BACKTRACE"] = "0"  # a panic is an error with a message


class TokenizerError(StageError):
    """A tokenizer that cannot be opened, or that fails on a text."""


class ChatTemplateError(StageError, TemplateError):
    """A chat template that refuses a conversation, or exceeds a bound. The message names its folder."""


class _Guarded:
    """A tokenizer whose methods raise TokenizerError."""

    def __init__(self, tokenizer: Tokenizer, file: str) -> None:
        self.__dict__.update(file=file, _its=tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Guarded, (self._its, self.file)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_its"], name)
        return partial(_called, value, self.file) if inspect.isroutine(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._its, name, value)


def _called(function: Callable[..., Any], file: str, *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except BaseException as error:
        # the library raises nothing narrower; a panic is no Exception, and its class cannot be imported
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise TokenizerError(
                f"the tokenizer {file} fails in {function.__name__}: {error}. Fix: correct the file, or use"
                " another tokenizer"
            ) from error
        raise


def guarded(tokenizer: Tokenizer, file: str) -> Tokenizer:
    """The tokenizer, with methods that raise TokenizerError. `file`: its name, for messages."""
    return cast(Tokenizer, _Guarded(tokenizer, file))


def load_tokenizer(path: Path, name: str = "") -> Tokenizer:
    """The tokenizer of a tokenizer.json with its run-time state. TokenizerError for anything but a fast
    tokenizer. `name`: of the file, for messages; by default its path."""
    return guarded(_called(Tokenizer.from_file, name or str(path), str(path)), name or str(path))


def open_tokenizer(path: Path, name: str = "") -> Tokenizer:
    """The tokenizer of a tokenizer.json, as `load_tokenizer`, without its run-time state."""
    tokenizer = load_tokenizer(path, name)
    set_state_aside(tokenizer)
    return tokenizer


def changed(tokenizer: Tokenizer, document: str) -> Tokenizer:
    """The tokenizer with a changed document in place of that of its file, without its run-time state."""
    file = getattr(tokenizer, "file", "tokenizer.json")
    copy = guarded(_called(Tokenizer.from_str, file, document), file)
    set_state_aside(copy)
    return copy


def open_folder(folder: Path, *, as_written: bool = False, name: str = "") -> Any:
    """The tokenizer of a folder as transformers opens it, without its run-time state; no code of the folder
    is run. Its `apply_chat_template` raises ChatTemplateError. TokenizerError when transformers cannot open
    the folder. `as_written`: exactly the tokenizer of its tokenizer.json; the class that the folder names may
    build another. `name`: that of the folder, for messages; by default its path."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    template_process.replace_rendering()
    opened, name = PreTrainedTokenizerFast if as_written else AutoTokenizer, name or str(folder)
    try:
        tokenizer = _called(
            opened.from_pretrained, name, folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # errors of many kinds
        message = error if isinstance(error, TokenizerError) else f"{type(error).__name__}: {error}"
        raise TokenizerError(f"transformers cannot open the tokenizer of {name}: {message}") from error
    if tokenizer.is_fast:
        set_state_aside(tokenizer.backend_tokenizer)
        tokenizer._tokenizer = guarded(tokenizer.backend_tokenizer, name)
    tokenizer.apply_chat_template = partial(_rendered, tokenizer.apply_chat_template, name)
    return tokenizer


def _rendered(render: Callable[..., Any], name: str, *arguments: Any, **named: Any) -> Any:
    try:
        return render(*arguments, **named)
    except (TemplateError, TypeError, ValueError) as error:
        message = f"the chat template of {name} fails: {error}. Fix: correct it, or use another model"
        raise ChatTemplateError(message) from error


def set_state_aside(tokenizer: Tokenizer) -> list[str]:
    """Removes the run-time state of a tokenizer. Returns the names of what there was."""
    state = {
        "truncation": tokenizer.truncation,
        "padding": tokenizer.padding,
        "dropout": getattr(tokenizer.model, "dropout", None),  # of merges, in BPE
    }
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if state["dropout"] is not None:
        tokenizer.model.dropout = None
    return [name for name, value in state.items() if value is not None]
