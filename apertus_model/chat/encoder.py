"""Encodes conversations as tokens, with a mask of the trained tokens.

Invariants:
- The tokens are those of the rendered text, as transformers tokenises it. Only the template makes control
  tokens: text inside a message, a tool or its output that spells one is encoded as text.
- The text of the assistant is trained: everything after `<|assistant_start|>` up to and including
  `<|assistant_end|>`, except outputs of tools and blocks with `train: False`. `<|assistant_end|>` is trained
  if the assistant's last block is. A token with characters of outputs and of a response is not trained.

How: before rendering, the texts of a conversation are marked with two characters that occur nowhere in it.
One splits every spelling of a control token, the other precedes responses. Both are found in the rendered
text, and removed. Two texts cannot spell a control token together, since there is always something between
them (`normalise` joins adjacent responses).
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from tokenizers import Tokenizer

from apertus_model.chat.messages import Block, ConversationError, Message, blocks_of, normal_tools, normalise
from apertus_model.chat.template import BLOCK_STARTS, CONTROL_TOKENS, END_OF_TURN, TOOLS_END, TURN, render
from apertus_model.tokenizer_files import changed
from specs.errors import StageError

PROMPT, TRAINED, UNTRAINED = 0, 1, 2
"""Kinds of tokens: those that are not the assistant's; those that are trained; those of its turns that never
are, which are outputs of tools and what the data exclude from training."""
_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # plane 15 of Unicode
_CONTROL = re.compile("(" + "|".join(map(re.escape, CONTROL_TOKENS)) + ")")


class ChatError(StageError):
    """A tokenizer without the special tokens of the chat format."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of a conversation."""

    tokens: NDArray[np.int64]  # (n,)
    mask: NDArray[np.uint8]  # (n,): PROMPT, TRAINED or UNTRAINED


class _Run(NamedTuple):
    """A control token, or text between two of them."""

    text: str
    control: bool  # whether it is a control token
    kind: int  # kind of the tokens from `border` on
    border: int = 0  # index of a character of the text
    before: int = PROMPT  # kind of the tokens before `border`


class ChatEncoder:
    """An encoder of conversations for one tokenizer, which is copied. `end_of_turn_id`: that of
    `<|assistant_end|>`; `vocab_size`: the largest id and one. ChatError when the tokenizer lacks a control
    token of the chat format, would find one in plain text, or has one that changes the text beside it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # what begins a text is marked as such; here a control token precedes every text
        document = tokenizer.to_str().replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
        self._tokenizer = changed(tokenizer, document)
        self._tokenizer.encode_special_tokens = True
        ids = {token: self._tokenizer.token_to_id(token) for token in CONTROL_TOKENS}
        if missing := [token for token, index in ids.items() if index is None]:
            raise ChatError(
                f"the tokenizer has no {', '.join(missing)}."
                " Fix: use one with the special tokens of the Apertus chat format"
            )
        self._ids: dict[str, int] = {token: index for token, index in ids.items() if index is not None}
        for token, index in self._ids.items():
            if index in self._tokenizer.encode(token, add_special_tokens=False).ids:
                raise ChatError(
                    f"the tokenizer finds {token} in plain text. Fix: mark it as special in its"
                    " tokenizer.json"
                )
        self._check_alone()
        self.end_of_turn_id = self._ids[END_OF_TURN]
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())

    def _check_alone(self) -> None:
        """ChatError for a control token whose options make the tokens of a text depend on its neighbours."""
        added = self._tokenizer.get_added_tokens_decoder()
        for index in self._ids.values():
            options = {name: getattr(added[index], name) for name in ("lstrip", "rstrip", "single_word")}
            options["normalized"] = added[index].normalized and self._tokenizer.normalizer is not None
            if enabled := [name for name, value in options.items() if value]:
                raise ChatError(
                    f"the tokenizer states {', '.join(enabled)} for {added[index].content}, so the text"
                    " beside it would have other tokens in inference than in training. Fix: set these options"
                    " to false in the added_tokens of its tokenizer.json"
                )

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Encoded:
        """A whole conversation, in any form that `normalise` accepts. ConversationError for anything else."""
        return self._encode(_runs(normalise(messages), normal_tools(tools), False))

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> NDArray[np.int64]:
        """The tokens of the messages and the opening of an assistant's turn, as (n,) int64."""
        return self._encode(_runs(normalise(messages), normal_tools(tools), True)).tokens

    def completion(self, text: str) -> NDArray[np.int64]:
        """The tokens of the assistant's plain-text answer and the end of its turn, as (n,) int64."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([*ids, self.end_of_turn_id], dtype=np.int64)

    def decode(self, tokens: NDArray[np.integer] | Sequence[int]) -> str:
        """The text of a completion; special tokens are left out."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def _encode(self, runs: Iterator[_Run]) -> Encoded:
        tokens: list[int] = []
        mask: list[int] = []
        for run in runs:
            if run.control:
                tokens.append(self._ids[run.text])
                mask.append(run.kind)
                continue
            encoded = self._tokenizer.encode(run.text, add_special_tokens=False)
            tokens += encoded.ids
            mask += [run.kind if start >= run.border else run.before for start, _ in encoded.offsets]
        return Encoded(np.array(tokens, dtype=np.int64), np.array(mask, dtype=np.uint8))


def _runs(
    messages: list[Message], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> Iterator[_Run]:
    """Yields the control tokens and texts of the rendered conversation, in order. ConversationError when the
    template cannot render it: an invalid schema of a tool, endless nesting."""
    try:
        marks = _Marks(messages, tools)
        marked = [marks.message(message) for message in messages]
        text = render(marked, marks.split(tools), add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, RecursionError) as error:
        raise ConversationError("not_rendered", f"the chat template cannot render this: {error}") from error
    turns = (blocks_of(message) for message in messages if message["role"] == "assistant")
    kinds: Iterator[int] = iter(())
    turn, before, kind = False, "", TRAINED
    for place, piece in enumerate(_CONTROL.split(text)):
        if place % 2:
            if turn and piece in BLOCK_STARTS:
                kind = next(kinds)
            yield _Run(piece, True, kind if turn else PROMPT)
            if piece == TURN:
                kinds = (
                    TRAINED if block.get("train", True) else UNTRAINED
                    for block in next(turns, [])
                    if block["type"] != "tool_outputs"
                )
            turn = piece == TURN or (turn and piece != END_OF_TURN)
            before = piece
        elif plain := marks.removed(piece):
            outputs = piece.partition(marks.answer)[0] if turn and before == TOOLS_END else ""
            if turn and before not in BLOCK_STARTS and outputs != piece:
                kind = next(kinds)
            yield _Run(plain, False, kind if turn else PROMPT, len(marks.removed(outputs)), UNTRAINED)


class _Marks:
    """The marks of one conversation: two private-use characters that do not occur in it."""

    def __init__(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> None:
        used = set(json.dumps([messages, tools], ensure_ascii=False))
        self.seam, self.answer = itertools.islice(
            (mark for mark in map(chr, _PRIVATE_USE) if mark not in used), 2
        )

    def removed(self, text: str) -> str:
        return text.replace(self.seam, "").replace(self.answer, "")

    def split(self, value: Any) -> Any:
        """The value with a seam in every spelling of a control token, at any depth."""
        if isinstance(value, str):
            if "<" in value:
                return _CONTROL.sub(lambda match: f"{match[0][0]}{self.seam}{match[0][1:]}", value)
            return value
        if isinstance(value, Mapping):
            return {self.split(key): self.split(item) for key, item in value.items()}
        return [self.split(item) for item in value] if isinstance(value, list) else value

    def message(self, message: Message) -> Message:
        """The message with its seams, and with a mark in front of each response among blocks."""
        marked = self.split(message)
        if isinstance(marked["content"], str):
            return marked
        blocks: list[Block] = [
            block | {"text": self.answer + block["text"]} if block["type"] == "response" else block
            for block in marked["content"]
        ]
        return marked | {"content": blocks}
