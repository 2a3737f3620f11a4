"""Adds personas to prompts as system messages.

Invariant: which persona a prompt has depends on the seed, the personas and the prompt's id alone.
"""

from __future__ import annotations

import hashlib
import json

from apertus_model.chat.messages import Message
from apertus_model.data.documents import texts_of
from apertus_model.data.rows import Row
from specs.errors import StageError
from specs.stages.preference_data import Personas


class DrawnPersonas:
    """The personas of a spec, read once. StageError when there are none."""

    def __init__(self, spec: Personas) -> None:
        self._spec = spec
        self._texts = [text.strip() for text in texts_of(spec) if text.strip()]
        if not self._texts:
            raise StageError(
                f"there is no persona in {spec.url}. Fix: correct the url or text_column of personas"
            )

    def of(self, prompt: Row) -> str:
        """The persona of a row of `prompts`."""
        key = json.dumps([self._spec.seed, prompt["id"]]).encode()
        digest = hashlib.blake2b(key, digest_size=8, person=b"apertus-persona").digest()
        return self._texts[int.from_bytes(digest, "little") % len(self._texts)]

    def asked(self, prompt: Row) -> Row:
        """The prompt with its persona, as a row of `prompts` without tokens and text, which would be those of
        the prompt alone."""
        system = self._spec.template.replace("{persona}", self.of(prompt))
        kept = {name: value for name, value in prompt.items() if name not in ("tokens", "text")}
        return kept | {"messages": with_system(prompt["messages"], system)}


def with_system(messages: list[Message], text: str) -> list[Message]:
    """Messages in normal form, with a text at the beginning of the system message."""
    own = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    system = {"role": "system", "content": text if not own else f"{text}\n\n{own}"}
    return [system, *messages[own is not None :]]
