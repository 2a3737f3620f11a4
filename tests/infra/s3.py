"""What tests need of an S3 server on the loopback address, whichever it is.

Invariant: a process finds the server through its environment alone, as users do, and no server answers but on
127.0.0.1.
"""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import s3fs
from aiobotocore.endpoint import AioEndpoint

REGION = "us-east-1"


class Server(ABC):
    """An S3 server that can be started and stopped. Between the two it answers at `endpoint`."""

    access_key: str
    secret_key: str

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """`http://127.0.0.1:port`."""

    @abstractmethod
    def start(self) -> None:
        """Returns when it answers."""

    @abstractmethod
    def stop(self) -> None:
        """Returns when it is gone."""

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to know."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @contextmanager
    def in_environment(self) -> Iterator[str]:
        """Inside, `s3://` of this process and of those that it starts is this server. Gives the URL of a
        bucket that is new."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ |= self.environment
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            bucket = f"test-{uuid.uuid4().hex[:12]}"
            s3fs.S3FileSystem().mkdir(bucket)
            yield f"s3://{bucket}"
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def requests() -> Iterator[Counter[str]]:
    """Counts, by the name of the operation, the requests of the S3 clients of this process; a second try
    is a request too."""
    sent: Counter[str] = Counter()
    create = AioEndpoint.create_request

    async def counted(endpoint: AioEndpoint, params: Any, operation_model: Any = None) -> Any:
        sent[operation_model.name] += 1
        return await create(endpoint, params, operation_model)

    AioEndpoint.create_request = counted
    try:
        yield sent
    finally:
        AioEndpoint.create_request = create
