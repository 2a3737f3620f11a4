"""A small server that speaks OpenAI's protocol, and misbehaves when a test says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Request = dict[str, Any]
Fault = Callable[["Handler"], None]


def texts_of(request: Request) -> list[str]:
    """What the model says: the number of the completion, and what it was asked."""
    asked = request["messages"][-1]["content"] if "messages" in request else request["prompt"]
    return [f"{index} {asked}" for index in range(request["n"])]


class Handler(BaseHTTPRequestHandler):
    """Answers a request, or shows the next fault of the server."""

    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(request)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.paths.append(self.path)
            self.server.headers.append(dict(self.headers))
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
            fault = self.server.faults.pop(0) if self.server.faults else None
        try:
            if fault is not None:
                fault(self)
                return
            self.server.pause()
            self.say(200, json.dumps(self.answer(request)).encode())
        finally:
            with self.server.lock:
                self.server.running -= 1

    def answer(self, request: Request) -> dict[str, Any]:
        named = [
            {"message": {"role": "assistant", "content": text}} if "messages" in request else {"text": text}
            for text in texts_of(request)
        ]
        ended = ["stop", "length"]
        choices = [
            {"index": index, "finish_reason": ended[index % 2], **one} for index, one in enumerate(named)
        ]
        return {"id": "1", "object": "completion", "choices": choices[::-1], "usage": {"total_tokens": 9}}

    def say(self, status: int, body: bytes, *, claimed: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if claimed is None else claimed))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Handler)
        self.lock = threading.Lock()
        self.requests: list[Request] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Fault | None] = []  # of the next requests, in their order
        self.running = self.most = 0
        self.pause: Callable[[], object] = lambda: None
        self.url = f"http://{host}:{self.server_address[1]}/v1"


@contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[Server]:
    server = Server(host)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def status(code: int, **headers: str) -> Fault:
    """An error with a body that repeats the key, as some servers do."""

    def show(handler: Handler) -> None:
        told = {"error": {"message": f"no: {handler.headers.get('Authorization')}"}}
        handler.say(code, json.dumps(told).encode(), **headers)

    return show


def half(handler: Handler) -> None:
    """The connection ends in the middle of the answer."""
    handler.say(200, b'{"choices": [{"te', claimed=400)
    handler.close_connection = True


def no_json(handler: Handler) -> None:
    """Half a line, as if it were all."""
    handler.say(200, b'{"choices": [{"te')


def empty(handler: Handler) -> None:
    handler.say(200, b"{}")


def hangs(handler: Handler) -> None:
    """Nothing, until the client has gone."""
    handler.connection.settimeout(5)
    handler.rfile.read(1)


def hangs_up(handler: Handler) -> None:
    handler.close_connection = True


OTHERS: list[Any] = ["1", -1, 2**70, 0.5, 1e308, True, None, [], {}]


def changed(document: Any) -> Iterator[tuple[str, Any]]:
    """The document with one value in it replaced by one of another type or range, left out, or repeated; and
    the place of that value."""
    for other in OTHERS:
        if type(other) is not type(document) or isinstance(other, int):
            yield "", other
    if isinstance(document, dict):
        for key, value in document.items():
            yield f".{key} left out", {name: one for name, one in document.items() if name != key}
            for place, other in changed(value):
                yield f".{key}{place}", document | {key: other}
    if isinstance(document, list):
        yield " emptied", []
        for index, value in enumerate(document):
            yield f"[{index}] repeated", [*document, value]
            for place, other in changed(value):
                yield f"[{index}]{place}", [*document[:index], other, *document[index + 1 :]]


def replies(document: Any) -> Fault:
    return lambda handler: handler.say(200, json.dumps(document).encode())
