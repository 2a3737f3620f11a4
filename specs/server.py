"""A server that speaks OpenAI's protocol, from which completions are sampled. Its URL only says where it is,
and is not part of what is sampled."""

import os
import re
from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from specs.base import Spec, execution, identity, option
from specs.redaction import is_secret
from specs.units import Duration, PositiveDuration


class Server(Spec):
    """The server from which `engine: server` samples. Start vLLM's server with `--generation-config vllm`, so
    that it samples as stated and not as the model's folder advises."""

    model: str = identity(min_length=1, description="name under which the server knows the model")
    api: Literal["completions", "chat"] = option(
        "completions",
        description="completions: the server has the model that this stage names, and is sent token ids;"
        " chat: it has any model, is sent messages, and renders them by its own template",
    )
    url: str = execution(description="URL with the path before /completions, such as http://host:8000/v1")
    key: str | None = execution(
        None, description="environment variable that holds the key of the server, such as SERVER_API_KEY"
    )
    proxy: str | None = execution(
        None,
        description="URL of an HTTP or SOCKS proxy; without it requests go to the server itself, whatever"
        " proxies the environment names",
    )
    requests: int = execution(32, ge=1, le=4096, description="maximum number of requests at the same time")
    timeout: PositiveDuration = execution(
        Duration(600.0), description="longest time until an answer is complete; then it is asked again"
    )

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not re.match(r"https?://[^/?#\s]+[^?#\s]*$", url):
            raise ValueError(
                "a server has a URL such as http://host:8000/v1, without a query; the key comes from the"
                " environment variable that `key` names"
            )
        return url.rstrip("/")

    @field_validator("proxy")
    @classmethod
    def _is_a_proxy(cls, proxy: str | None) -> str | None:
        if proxy is not None and not re.match(r"(https?|socks5h?)://[^/?#\s]+/?$", proxy):
            raise ValueError("a proxy has a URL such as http://proxy:3128, without a path")
        return proxy

    def conflicts(self) -> Iterator[str]:
        if self.proxy is not None and re.match(r"https?://(localhost|127\.[\d.]+|\[::1\])(:|/|$)", self.url):
            yield "url is on this machine, which no proxy can reach; remove proxy"

    @field_validator("key")
    @classmethod
    def _names_a_secret(cls, key: str | None) -> str | None:
        if key is not None and not (re.match(r"[A-Za-z_][A-Za-z0-9_]*$", key) and is_secret(key)):
            raise ValueError(
                "not the name of an environment variable whose value is masked in logs; write such as"
                " SERVER_API_KEY, never the key itself"
            )
        return key

    @property
    def unset_key(self) -> str | None:
        """The environment variable that `key` names, if it is not set in this process; else None."""
        return self.key if self.key is not None and not os.environ.get(self.key, "").strip() else None
