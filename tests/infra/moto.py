"""moto's S3 server in a thread of this process: what it holds goes with it.

Invariant: its conditional writes are atomic, since there is one PUT at a time: it looks, and then writes.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

from tests.infra.s3 import Server


class Moto(Server):
    access_key, secret_key = "test", "test"

    def __init__(self) -> None:
        from moto.s3.responses import S3Response
        from moto.server import ThreadedMotoServer

        S3Response.put_object = _one_at_a_time(S3Response.put_object)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    @property
    def endpoint(self) -> str:
        host, port = self._server.get_host_and_port()
        return f"http://{host}:{port}"

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


def _one_at_a_time(call: Any) -> Any:
    lock = threading.Lock()

    @functools.wraps(call)
    def alone(*arguments: Any, **options: Any) -> Any:
        with lock:
            return call(*arguments, **options)

    return alone
