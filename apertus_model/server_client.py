"""Sends requests to a server that speaks OpenAI's protocol, several at a time, each repeated within bounds.

Invariants: an answer is taken whole or not at all, as it was sent: a compressed one is refused, so that
`MAX_BYTES` bounds what is held. After a failure that may pass (429, 5xx, no connection, no
answer, half an answer) the server is asked again, at most `TRIES` times, and no earlier than it says in
`Retry-After`; a failure that cannot pass (another status) ends the stage at once. The key is sent in a
header, only to the server that the recipe names (redirects are not followed), directly or through the proxy
that it names, and never logged.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from apertus_model.prompt_format import GenerationError
from specs.foreign import MAX_BYTES, Foreign, ForeignError, checked, parse_json, shown
from specs.redaction import redacted
from specs.server import Server

TRIES = 8
LONGEST_WAIT = 60.0  # seconds between two tries, if the server does not say
LONGEST_ASKED = 600.0  # seconds that a server may ask to wait
CONNECT = 30.0  # seconds for a connection
PASSES = (408, 409, 425, 429)  # statuses that may pass, besides 5xx


Request = dict[str, Any]
Document = TypeVar("Document", bound=Foreign)
Found = TypeVar("Found")


class ServerFailure(OSError):
    """The server did not answer in all tries. Another attempt of the stage may succeed."""


class MayPass(Exception):
    """A try that failed; `wait`: seconds that the server asks for."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class ServerClient:
    """A client of one address, `path`, below the url of a server. `pause`: waits for some seconds, or until
    waiting is pointless; the default ends when another request has failed. GenerationError when the
    environment variable with the key is not set."""

    def __init__(self, server: Server, path: str, pause: Callable[[float], object] | None = None) -> None:
        self.url = f"{server.url}/{path}"
        self._server = server
        self._failed = threading.Event()
        self._pause = pause or self._failed.wait
        headers = {"Accept-Encoding": "identity"}
        if server.key is not None:
            if not (key := os.environ.get(server.key, "").strip()):
                raise GenerationError(
                    f"server.key names the environment variable {server.key}, which is not set. Fix: set it"
                    " where the stage runs"
                )
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.Client(
            headers=headers,
            proxy=server.proxy,
            trust_env=False,  # neither proxies nor passwords that the environment names
            verify=httpx.create_ssl_context(),  # but its certificates
            timeout=httpx.Timeout(server.timeout.seconds, connect=min(CONNECT, server.timeout.seconds)),
            limits=httpx.Limits(max_connections=server.requests),
        )

    def ask_all(
        self,
        requests: Sequence[tuple[str, Request]],
        answer: type[Document],
        parse: Callable[[Document], Found],
    ) -> list[Found]:
        """The results of `parse` for the answers to requests (what each is about, for messages, and its
        body), several at a time. An answer that has not the form `answer`, or for which `parse` raises
        ForeignError, is asked for again; any other error ends all. ServerFailure after all
        tries; GenerationError for a wrong answer that asking again does not change."""
        self._failed.clear()
        with ThreadPoolExecutor(self._server.requests, thread_name_prefix="server") as pool:
            asked = [pool.submit(self._asked, what, body, answer, parse) for what, body in requests]
            try:
                return [future.result() for future in asked]
            except BaseException:
                self._failed.set()  # no other request is tried again
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _asked(
        self, what: str, body: Request, answer: type[Document], parse: Callable[[Document], Found]
    ) -> Found:
        for tried in range(TRIES):
            try:
                return parse(checked(answer, parse_json(self._sent(body))))
            except ForeignError as error:
                failure = MayPass(f"an answer that cannot be read: {error}")
            except MayPass as passing:
                failure = passing
            if self._failed.is_set():
                break
            if tried + 1 < TRIES:
                self._pause(min(2.0**tried, LONGEST_WAIT) if failure.wait is None else failure.wait)
        raise ServerFailure(
            f"{self.url} did not answer {what} in {tried + 1} tries: {redacted(str(failure))}."
            " Finished units are stored; the same command asks for the others"
        )

    def _sent(self, body: Request) -> bytes:
        """The whole answer to one request."""
        limit = self._server.timeout.seconds
        deadline = time.monotonic() + limit
        data = bytearray()
        try:
            with self._client.stream("POST", self.url, json=body) as answer:
                if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
                    raise MayPass(f"an answer in Content-Encoding {shown(encoding)}, which was not asked for")
                for piece in answer.iter_raw():
                    data += piece
                    if len(data) > MAX_BYTES:
                        raise MayPass(f"an answer of more than {MAX_BYTES:,} bytes")
                    if time.monotonic() > deadline:
                        raise MayPass(f"no whole answer in {limit:g} s")
        except httpx.TimeoutException as error:
            raise MayPass(f"no answer in {limit:g} s ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise MayPass(f"{type(error).__name__}: {error}") from error
        if answer.status_code == 200:
            return bytes(data)
        answered = f"HTTP {answer.status_code}: {redacted(data.decode(errors='replace'))[:300]}"
        if answer.status_code in PASSES or answer.status_code >= 500:
            raise MayPass(answered, asked_to_wait(answer.headers.get("Retry-After"), datetime.now(UTC)))
        raise GenerationError(
            f"{self.url} refuses model {self._server.model!r} with {answered}."
            " Fix: correct url, model, api or key of server, or the settings of the sampling"
        )


def asked_to_wait(header: str | None, now: datetime) -> float | None:
    """The seconds that a `Retry-After` header asks for, as a number or as a date (RFC 9110, 10.2.3), up to
    `LONGEST_ASKED`; None if it is missing or cannot be read."""
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
