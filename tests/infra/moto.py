"""moto's S3 server in a thread of this process. What it holds goes with it.

moto looks whether there is an object, then stores the new one, so of conditional writes at the same moment
several may win (seen on a busy machine). S3 does both at once; here such requests are served one at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tests.infra.s3 import Server


class Moto(Server):
    access_key, secret_key = "test", "test"

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    @property
    def endpoint(self) -> str:
        host, port = self._server.get_host_and_port()
        return f"http://{host}:{port}"

    def start(self) -> None:
        self._server.start()
        server = self._server._server
        assert server is not None
        inner, one_at_a_time = server.app, threading.Lock()

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            if "HTTP_IF_NONE_MATCH" not in environ:
                return inner(environ, start_response)  # type: ignore[no-any-return]
            with one_at_a_time:
                return [*inner(environ, start_response)]

        server.app = app

    def stop(self) -> None:
        self._server.stop()
