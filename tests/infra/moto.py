"""moto's S3 server in a thread of this process: its conditional writes are atomic, and what it holds goes with it."""

from __future__ import annotations

import logging

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

    def stop(self) -> None:
        self._server.stop()
