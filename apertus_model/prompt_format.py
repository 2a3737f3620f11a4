"""Turns a prompt into the token ids that a model reads, and its answer into what is stored.

A model of our chat format reads the tokens of the `prompts` artifact. A model of another architecture has
another tokenizer: it reads the same messages, rendered by its own chat template.

Invariant: stored tokens are those of the tokenizer of the prompts, whatever model answered, so that rewards,
pairs and training read one vocabulary. An answer of another model is encoded again, from its text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Required, TypedDict

from apertus_model.chat.encoder import ChatEncoder
from apertus_model.chat.usual import usual_messages, usual_tools
from apertus_model.data.rows import Row
from apertus_model.tokenizer_files import ChatTemplateError, open_folder, open_tokenizer
from specs.errors import StageError
from specs.foreign import checked, parse_json, read_local
from specs.hugging_face_files import MOST, GenerationConfig, OtherConfig


class Completion(TypedDict, total=False):
    """An answer as it is stored."""

    tokens: Required[list[int]]
    text: str  # not stored for a continuation, which is compared by tokens alone
    finished: bool  # whether the model ended its turn


class GenerationError(StageError):
    """The engine that the spec names cannot be used here, or the model cannot be asked."""


class TextFormat:
    """The format of a model of which only the text is known, such as one that only a server has."""

    def __init__(self, tokenizer: Path) -> None:
        """`tokenizer`: the tokenizer.json of the prompts."""
        self.encoder = ChatEncoder(open_tokenizer(tokenizer))

    def written(self, text: str, finished: bool) -> Completion:
        """An answer with the tokens of its text, and with the end of the turn if the model ended it."""
        tokens = self.encoder.completion(text).tolist()
        return {"text": text, "tokens": tokens if finished else tokens[:-1], "finished": finished}


class TokenFormat:
    """The format of a model whose token ids are known. `end_ids` end its turn, if anything does; `pad_id` is
    masked everywhere; ids are less than `vocab_size`."""

    end_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int

    def tokens(self, prompt: Row) -> list[int]:
        """The ids that the model reads for a row of `prompts`."""
        raise NotImplementedError

    def completion(self, tokens: list[int]) -> Completion:
        """The completion in generated ids, up to and including the first id that ends the turn."""
        raise NotImplementedError


class OwnFormat(TextFormat, TokenFormat):
    """The format of a model that was trained with the tokenizer of the prompts."""

    def __init__(self, tokenizer: Path, end_of_turn_id: int, pad_id: int, room: int = MOST) -> None:
        """`room`: the number of tokens that a prompt may have, if its row does not state them."""
        super().__init__(tokenizer)
        self.end_ids, self.pad_id, self._room = (end_of_turn_id,), pad_id, room
        self.vocab_size = self.encoder.vocab_size

    def tokens(self, prompt: Row) -> list[int]:
        """See `TokenFormat.tokens`. GenerationError when a prompt with a persona leaves no room."""
        if "tokens" in prompt:
            return prompt["tokens"]
        tokens: list[int] = self.encoder.prompt(prompt["messages"], prompt.get("tools")).tolist()
        return _fitting(prompt, tokens, self._room)

    def completion(self, tokens: list[int]) -> Completion:
        tokens, finished = _until(tokens, self.end_ids)
        return {"text": self.encoder.decode(tokens), "tokens": tokens, "finished": finished}


class OtherFormat(TextFormat, TokenFormat):
    """The format of a Hugging Face folder with its own tokenizer and chat template. GenerationError without a
    template or the id that ends a turn, TokenizerError when transformers cannot open the tokenizer."""

    def __init__(self, folder: Path, tokenizer: Path, max_new_tokens: int) -> None:
        """`tokenizer`: the tokenizer.json of the prompts. GenerationError when the folder lacks a chat
        template or the id that ends a turn, TokenizerError when transformers cannot open its tokenizer."""
        super().__init__(tokenizer)
        self._its: Any = open_folder(folder, as_written=True)
        if not self._its.chat_template:
            raise GenerationError("the model has no chat template. Fix: add its chat_template.jinja")
        config = config_of(folder)
        self._room = config.context - max_new_tokens
        candidates = [config.eos_token_id, self._its.eos_token_id]
        if (advice := folder / "generation_config.json").exists():
            candidates.insert(0, checked(GenerationConfig, parse_json(read_local(advice))).eos_token_id)
        ends: int | list[int] = next((ids for ids in candidates if ids is not None), [])
        self.end_ids = tuple(ends) if isinstance(ends, list) else (ends,)
        if not self.end_ids:
            raise GenerationError("nothing ends a turn. Fix: set eos_token_id in its generation_config.json")
        self.pad_id = self.end_ids[0]
        self.vocab_size = 1 + max(self._its.get_vocab().values())

    def tokens(self, prompt: Row) -> list[int]:
        """See `TokenFormat.tokens`. GenerationError when the template refuses it, or it leaves no room."""
        try:
            text = self._its.apply_chat_template(
                usual_messages(prompt["messages"]),
                tools=usual_tools(prompt.get("tools")),
                add_generation_prompt=True,
                tokenize=False,
            )
        except ChatTemplateError as error:
            raise GenerationError(
                f"prompt {prompt['id']}: {error}, or leave the source of the prompt out of prompts"
            ) from error
        tokens: list[int] = self._its(text, add_special_tokens=False)["input_ids"]
        return _fitting(prompt, tokens, self._room)

    def completion(self, tokens: list[int]) -> Completion:
        tokens, finished = _until(tokens, self.end_ids)
        return self.written(self._its.decode(tokens, skip_special_tokens=True), finished)


def config_of(folder: Path) -> OtherConfig:
    """The content of the `config.json` in a folder, of any architecture."""
    return checked(OtherConfig, parse_json(read_local(folder / "config.json")))


def _fitting(prompt: Row, tokens: list[int], room: int) -> list[int]:
    """The tokens. GenerationError when they are more than `room`."""
    if len(tokens) > room:
        raise GenerationError(
            f"prompt {prompt['id']} has {len(tokens):,} tokens of this model, whose context leaves room for"
            f" {room:,} beside max_new_tokens. Fix: lower max_new_tokens, or drop long prompts"
        )
    return tokens


def _until(tokens: list[int], ends: Sequence[int]) -> tuple[list[int], bool]:
    """The ids up to and including the first of `ends`, and whether there is one."""
    place = next((index for index, token in enumerate(tokens) if token in ends), None)
    return (tokens, False) if place is None else (tokens[: place + 1], True)
