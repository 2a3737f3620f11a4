"""Completions from a server that speaks OpenAI's protocol: several requests at a time, each of them repeated
within bounds.

Invariants: an answer is taken whole or not at all. What may pass (429, 5xx, no connection, no answer, half an
answer) is asked again, at most `TRIES` times, and no earlier than the server says in `Retry-After`; what
cannot pass (another status) ends the stage at once. The key is sent in a header, only to the server that the
recipe names (redirects are not followed), and never logged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from pydantic import Field

from apertus_model.chat.messages import protocol_messages, usual_tools
from apertus_model.data.rows import Row
from apertus_model.prompt_format import Completion, GenerationError, TextFormat, TokenFormat
from specs.foreign import MAX_BYTES, Foreign, ForeignError, checked, parse_json
from specs.redaction import redacted
from specs.stages.preference_data import Sampling

TRIES = 8
LONGEST_WAIT = 60.0  # seconds between two tries, where the server does not say
LONGEST_ASKED = 600.0  # seconds that a server may ask to wait
CONNECT = 30.0  # seconds for a connection
PASSES = (408, 409, 425, 429)  # statuses that may pass, beside 5xx


class ServerFailure(OSError):
    """The server did not answer in all tries. Another attempt of the stage may succeed."""


class _Message(Foreign):
    content: str | None = None


class _Choice(Foreign):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None  # of vLLM, which is asked for them
    message: _Message | None = None
    finish_reason: str


class _Answer(Foreign):
    choices: list[_Choice] = Field(min_length=1)


class _MayPass(Exception):
    """A try that failed; `wait`: seconds that the server asks for."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class ServerGenerator:
    """Sampling by a server.

    Args:
        sampling: with its `server`.
        written: the format of the model; with `api: chat` its text suffices.
        seed_of: the seed of the prompt with an index.
        pause: waits for seconds, or until it is pointless; the default ends when another request has failed.

    Raises:
        GenerationError: the environment variable with the key is not set.
    """

    def __init__(
        self,
        sampling: Sampling,
        written: TextFormat,
        seed_of: Callable[[int], int],
        pause: Callable[[float], object] | None = None,
    ) -> None:
        assert sampling.server is not None, "checked with the spec"
        self._sampling, self._server, self._format, self._seed_of = (
            sampling,
            sampling.server,
            written,
            seed_of,
        )
        self._failed = threading.Event()
        self._pause = pause or self._failed.wait
        server, headers = self._server, {}
        if server.key is not None:
            if not (key := os.environ.get(server.key, "").strip()):
                raise GenerationError(
                    f"server.key names the environment variable {server.key}, which is not set. Fix: set it"
                    " where the stage runs"
                )
            headers = {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(server.timeout.seconds, connect=min(CONNECT, server.timeout.seconds)),
            limits=httpx.Limits(max_connections=server.requests),
        )
        path = "chat/completions" if server.api == "chat" else "completions"
        self._url = f"{server.url}/{path}"

    def complete(self, prompts: Sequence[Row], *, first: int) -> list[list[Completion]]:
        """As `Generator.complete`. ServerFailure when a prompt has no answer after all tries; GenerationError
        for an answer that asking again does not change."""
        self._failed.clear()
        with ThreadPoolExecutor(self._server.requests, thread_name_prefix="server") as pool:
            answers = [pool.submit(self._asked, row, first + index) for index, row in enumerate(prompts)]
            try:
                return [answer.result() for answer in answers]
            except BaseException:
                self._failed.set()  # no other request is tried again
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _asked(self, prompt: Row, index: int) -> list[Completion]:
        """All completions of one prompt."""
        body = self._body(prompt, index)
        last = ""
        for tried in range(TRIES):
            try:
                return self._read(self._sent(body), body["n"])
            except _MayPass as failure:
                last = str(failure)
                wait = min(2.0**tried, LONGEST_WAIT) if failure.wait is None else failure.wait
            if self._failed.is_set():
                break
            if tried + 1 < TRIES:
                self._pause(wait)
        raise ServerFailure(
            f"{self._url} did not answer prompt {prompt['id']} in {tried + 1} tries: {redacted(last)}."
            " Finished units are stored; the same command asks for the others"
        )

    def _body(self, prompt: Row, index: int) -> dict[str, Any]:
        """The request. At temperature 0 all completions are the same, and one is asked for."""
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self._server.model,
            "n": 1 if sampling.temperature == 0 else sampling.n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": self._seed_of(index),
        }
        if self._server.api == "completions":
            assert isinstance(self._format, TokenFormat), "the plan gives the model"
            return body | {"prompt": self._format.tokens(prompt), "return_token_ids": True}
        tools = usual_tools(prompt.get("tools"))
        messages = protocol_messages(prompt["messages"])
        return body | {"messages": messages} | ({"tools": tools} if tools else {})

    def _sent(self, body: dict[str, Any]) -> bytes:
        """The whole answer to one request."""
        limit = self._server.timeout.seconds
        deadline = time.monotonic() + limit
        data = bytearray()
        try:
            with self._client.stream("POST", self._url, json=body) as answer:
                for piece in answer.iter_bytes():
                    data += piece
                    if len(data) > MAX_BYTES:
                        raise _MayPass(f"an answer of more than {MAX_BYTES:,} bytes")
                    if time.monotonic() > deadline:
                        raise _MayPass(f"no whole answer in {limit:g} s")
        except httpx.TimeoutException as error:
            raise _MayPass(f"no answer in {limit:g} s ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise _MayPass(f"{type(error).__name__}: {error}") from error
        if answer.status_code == 200:
            return bytes(data)
        told = f"HTTP {answer.status_code}: {redacted(data.decode(errors='replace'))[:300]}"
        if answer.status_code in PASSES or answer.status_code >= 500:
            raise _MayPass(told, asked_to_wait(answer.headers.get("Retry-After"), datetime.now(UTC)))
        raise GenerationError(
            f"{self._url} refuses model {self._server.model!r} with {told}. Fix: url, model, api or key of"
            " server, or the settings of the sampling"
        )

    def _read(self, data: bytes, count: int) -> list[Completion]:
        """The completions in an answer."""
        try:
            found = checked(_Answer, parse_json(data)).choices
        except ForeignError as error:
            raise _MayPass(f"an answer that cannot be read: {error}") from error
        if len(found) != count:
            raise GenerationError(
                f"{self._url} gives {len(found)} completions where n: {count} are asked for. Fix: n: 1, or"
                " a server that has n"
            )
        ordered = sorted(found, key=lambda choice: choice.index)
        return [self._completion(one) for one in ordered] * (self._sampling.n // count)

    def _completion(self, choice: _Choice) -> Completion:
        """By the sampled ids where the server gives them, else by the text, which is encoded again."""
        finished = choice.finish_reason == "stop"
        if choice.token_ids is not None and isinstance(self._format, TokenFormat):
            ends = self._format.end_ids
            whole = not finished or any(token in ends for token in choice.token_ids)
            return self._format.completion(choice.token_ids if whole else [*choice.token_ids, ends[0]])
        text = choice.text if choice.message is None else choice.message.content
        return self._format.written(text or "", finished)


def asked_to_wait(header: str | None, now: datetime) -> float | None:
    """Seconds that a `Retry-After` asks for, as a number or as a date (RFC 9110, 10.2.3), up to
    `LONGEST_ASKED`; None for none, or for one that cannot be read."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(header) - now).total_seconds()
        except (TypeError, ValueError):
            return None
    return min(max(seconds, 0.0), LONGEST_ASKED) if seconds == seconds else None
