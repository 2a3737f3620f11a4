"""The `prompts` part: turns conversations into prompts to complete, with their offline completions.

Artifact: `prompts-00000.jsonl`, ..., a prompt per line:

    id             hash of the prompt's tokens: the same prompt has the same id everywhere
    conversations  ids of the conversations that it was taken from
    group          of the first of them, as `metadata`
    messages       all turns before the last one of the assistant; `tools`: those of the conversation, or null
    text           the prompt as the model sees it, control tokens included; `tokens`: the same as ids
    answer         the answer of the conversation itself, or null; kept even if it is not a completion
    completions    offline completions: {"text", "tokens"}; the tokens end with the end of the turn

Invariants:
- A prompt appears once: conversations with the same prompt tokens are merged, with their different
  completions in stored order.
- Prompts are in the order of a hash of (seed, tokens), which is independent of the order of the files and of
  other prompts; `limit` takes the first ones.
- Every conversation and every completion is accounted for: kept, or dropped for a stated reason.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apertus_model.chat.messages import response_of
from apertus_model.data.conversations.rows import EncodedConversations, tokenizer_facts
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.rows import Row, write_rows
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.work import run_units
from infra.store import Attempt
from specs.errors import StageError, counts_in_words
from specs.stages.preference_data import PromptsPart

ID_BYTES = 16


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. StageError when no prompt is left."""
    part = PromptsPart.model_validate(attempt.job.spec)
    units = run_units(Units(attempt), attempt, stop, progress, processes=part.WORKERS)
    files = [unit.files["rows.jsonl"] for unit in units]
    counts: Counter[str] = Counter()
    facts = write_rows(attempt, "prompts", _merge(part, files, counts))
    summary = counts_in_words(counts) if counts else "there are no conversations"
    if not facts["rows"]:
        raise StageError(
            f"no prompt is left: {summary}. Fix: raise max_tokens"
            f" {part.max_tokens}, lower max_new_tokens {part.max_new_tokens}, or use other conversations"
        )
    progress.log(summary)
    attempt.commit(metrics=dict(counts), facts=tokenizer_facts(attempt) | facts)


class Units(EncodedConversations):
    """Ranges of conversations, as candidate rows: each is a prompt, or `{"dropped": reason}`."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._part = PromptsPart.model_validate(attempt.job.spec)
        self._add_units("conversations", self._part.split, self._part.prompts_per_unit)

    def _row(self, conversation: Conversation, number: int) -> Row:
        part, messages = self._part, conversation.messages
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            return {"dropped": "conversations_without_prompt"}
        tokens = self._encoder.prompt(messages, conversation.tools)
        if tokens.size + part.max_new_tokens > part.max_tokens:
            return {"dropped": "conversations_too_long"}
        completions = [
            {"text": text, "tokens": self._encoder.completion(text).tolist()}
            for text in (conversation.completions if part.offline else [])
        ]
        most = part.max_tokens - tokens.size
        short = [completion for completion in completions if len(completion["tokens"]) <= most]
        return {
            "key": order_key(part.seed, tokens),
            "id": prompt_id(tokens),
            "conversation": conversation.id,
            "group": conversation.group,
            "messages": messages,
            "tools": conversation.tools,
            "text": self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False),
            "tokens": tokens.tolist(),
            "answer": response_of(conversation.messages[-1]),
            "completions": short,
            "completions_too_long": len(completions) - len(short),
            "metadata": conversation.metadata,
        }


def prompt_id(tokens: NDArray[np.int64]) -> str:
    """The hash of a prompt's tokens, as 32 hexadecimal digits."""
    data = tokens.astype("<i8").tobytes()
    return hashlib.blake2b(data, digest_size=ID_BYTES, person=b"apertus-prompt").hexdigest()


def order_key(seed: int, tokens: NDArray[np.int64]) -> str:
    """The sort key of prompts: a hash of the seed and the prompt's tokens."""
    state = hashlib.blake2b(json.dumps(seed).encode(), digest_size=ID_BYTES, person=b"apertus-order")
    state.update(tokens.astype("<i8").tobytes())
    return state.hexdigest()


def _merge(part: PromptsPart, files: list[Path], counts: Counter[str]) -> Iterator[Row]:
    """Yields the prompts in their final order, and fills `counts`. Only a key and a file position per
    conversation are held in memory."""
    places: list[tuple[str, int, int]] = []
    for number, path in enumerate(files):
        with open(path, "rb") as file:
            offset = 0
            for line in file:
                row = json.loads(line)
                counts["conversations"] += 1
                if "dropped" in row:
                    counts[row["dropped"]] += 1
                else:
                    places.append((row["key"], number, offset))
                offset += len(line)
    places.sort()
    for _, same in groupby(places, key=lambda place: place[0]):
        prompt = _unite([_read(files[number], offset) for _, number, offset in same], counts)
        if len(prompt["completions"]) + part.sampled < part.min_branches:
            counts["prompts_with_few_completions"] += 1
        elif part.limit is not None and counts["prompts"] >= part.limit:
            counts["prompts_beyond_limit"] += 1
        else:
            counts["prompts"] += 1
            counts["completions"] += len(prompt["completions"])
            counts["prompt_tokens"] += len(prompt["tokens"])
            yield prompt


def _read(path: Path, offset: int) -> Row:
    with open(path, "rb") as file:
        file.seek(offset)
        row: Row = json.loads(file.readline())
    return row


def _unite(rows: list[Row], counts: Counter[str]) -> Row:
    """One prompt, from the conversations that share it."""
    completions: dict[str, dict[str, Any]] = {}
    for row in rows:
        counts["completions_too_long"] += row["completions_too_long"]
        for completion in row["completions"]:
            if completion["text"] in completions:
                counts["completions_repeated"] += 1
            completions.setdefault(completion["text"], completion)
    counts["conversations_merged"] += len(rows) - 1
    first = rows[0]
    kept = ("group", "messages", "tools", "text", "tokens", "answer", "metadata")
    return {
        "id": first["id"],
        "conversations": [row["conversation"] for row in rows],
        **{name: first[name] for name in kept},
        "completions": list(completions.values()),
    }
