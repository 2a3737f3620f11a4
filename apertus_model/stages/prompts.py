"""The `prompts` part: from conversations to prompts to complete, with their offline completions.

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
- The order is that of a hash of (seed, tokens), and `limit` takes the first: it is independent of the order
  of the files and of other prompts.
- Every conversation and every completion is accounted for: kept, or dropped for a stated reason.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from apertus_model.chat import ChatEncoder
from apertus_model.chat.messages import response_of
from apertus_model.data.conversations import Conversation, ConversationShards
from apertus_model.data.rows import Row, Units, spans, write_rows
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from specs.errors import StageError
from specs.job import Job
from specs.stages.preference_data import PromptsPart

COPIED_FACTS = ("tokenizer", "vocab_size", "bos_id", "eos_id", "pad_id", "end_of_turn_id")
ID_BYTES = 16


class PromptsError(StageError):
    """No prompt is left. The message counts the reasons."""


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. PromptsError when nothing is left."""
    part = PromptsPart.model_validate(job.spec)
    roles = sorted(
        (role for role in job.inputs if role.startswith("conversations:")),
        key=lambda role: int(role.split(":")[1]),
    )
    artifacts = [attempt.input_artifact(role) for role in roles]
    tokenizer = attempt.input_artifact("tokenizer")
    reader = PromptReader(part, Tokenizer.from_file(str(tokenizer.local("tokenizer.json"))))
    files: list[Path] = []
    for number, artifact in enumerate(artifacts):
        shards = ConversationShards(artifact, part.split)
        units = Units(attempt, f"conversations-{number}", spans(len(shards), part.prompts_per_unit))
        units.compute(partial(reader.rows, shards), progress, items="conversations")
        files += units.files()
    counts: Counter[str] = Counter()
    facts = write_rows(attempt, "prompts", _merge(part, files, counts))
    story = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    if not facts["rows"]:
        raise PromptsError(
            f"no prompt is left: {story or 'there are no conversations'}. Fix: max_tokens {part.max_tokens},"
            f" max_new_tokens {part.max_new_tokens}, or other conversations"
        )
    progress.log(story)
    copied = {name: artifacts[0].manifest.facts[name] for name in COPIED_FACTS}
    if copied["pad_id"] is None:  # an imported tokenizer may have none; padding is masked everywhere
        copied["pad_id"] = copied["eos_id"]
    attempt.commit(metrics=dict(counts), facts=copied | facts)


class PromptReader:
    """Conversations as candidate rows, each independent of the others."""

    def __init__(self, part: PromptsPart, tokenizer: Tokenizer) -> None:
        self._part = part
        self._tokenizer = tokenizer
        self._encoder = ChatEncoder(tokenizer)

    def rows(self, shards: ConversationShards, start: int, stop: int) -> Iterator[Row]:
        """A row per conversation: of a prompt, or `{"dropped": reason}`."""
        for index in range(start, stop):
            yield self._row(shards.conversation(index))

    def _row(self, conversation: Conversation) -> Row:
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
        short = [
            completion
            for completion in completions
            if tokens.size + len(completion["tokens"]) <= part.max_tokens
        ]
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
    """Hash of a prompt's tokens, 32 hexadecimal digits."""
    return hashlib.blake2b(
        tokens.astype("<i8").tobytes(), digest_size=ID_BYTES, person=b"apertus-prompt"
    ).hexdigest()


def order_key(seed: int, tokens: NDArray[np.int64]) -> str:
    """The sort key of prompts: a hash of the seed and the prompt's tokens."""
    state = hashlib.blake2b(json.dumps(seed).encode(), digest_size=ID_BYTES, person=b"apertus-order")
    state.update(tokens.astype("<i8").tobytes())
    return state.hexdigest()


def _merge(part: PromptsPart, files: Iterable[Path], counts: Counter[str]) -> Iterator[Row]:
    """Prompts in their final order; fills `counts`. Only a key and a place per conversation are held in
    memory."""
    places: list[tuple[str, int, int]] = []
    opened = list(files)
    for number, path in enumerate(opened):
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
        prompt = _unite([_read(opened[number], offset) for _, number, offset in same], counts)
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
    """One prompt of the conversations that share it."""
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
