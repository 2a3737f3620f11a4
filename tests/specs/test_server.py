"""`server:` of a sampling: what is refused, and what identifies its answers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.base import encode
from specs.server import Server
from specs.stages.preference_data import Sampling

SERVER: dict[str, Any] = {"url": "http://host:8000/v1/", "model": "ours"}


def sampling(**server: Any) -> Sampling:
    return Sampling(max_new_tokens=8, engine="server", server=Server(**(SERVER | server)))


def test_place_key_and_limits_do_not_identify_an_answer() -> None:
    own = encode(sampling())
    other = {"url": "https://elsewhere/v2", "key": "SERVER_API_KEY", "requests": 1, "timeout": "5s"}
    assert own["server"] == {"model": "ours"}
    assert encode(sampling(**other)) == own
    assert encode(sampling(model="theirs")) != own
    assert encode(sampling(api="chat")) != own
    assert "server" not in encode(Sampling(max_new_tokens=8))  # old fingerprints stay


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter22@host/v1",
        "http://host/v1?api_key=hunter22",
        "http://host/v1?a=hunter22",
        "ftp://host",
        "host:8000",
        "http://",
    ],
)
def test_a_url_with_credentials_or_that_is_none_is_refused_without_repeating_the_secret(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Server(**(SERVER | {"url": url}))
    assert "hunter22" not in caught.value.errors(include_input=False, include_url=False)[0]["msg"]


@pytest.mark.parametrize("key", ["sk-abcdef0123456789", "HOME", "", "two words"])
def test_a_key_is_the_name_of_a_variable_that_logs_mask(key: str) -> None:
    with pytest.raises(
        ValidationError, match="not the name of an environment variable whose value is masked"
    ):
        Server(**SERVER, key=key)
    assert Server(**SERVER, key="SERVER_API_KEY").key == "SERVER_API_KEY"


@pytest.mark.parametrize("stated", [{"engine": "server"}, {"server": SERVER}])
def test_engine_and_server_belong_together(stated: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="belong together; set both or neither"):
        Sampling(max_new_tokens=8, **stated)


@pytest.mark.parametrize("proxy", ["proxy:3128", "ftp://proxy", "http://proxy/path", "socks://proxy"])
def test_a_proxy_is_a_url_without_a_path(proxy: str) -> None:
    assert encode(sampling(proxy="http://proxy:3128")) == encode(sampling())
    with pytest.raises(ValidationError, match="a proxy has a URL such as http://proxy:3128, without"):
        sampling(proxy=proxy)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2", "[::1]"])
def test_a_server_on_this_machine_has_no_proxy(host: str) -> None:
    with pytest.raises(ValidationError, match="url is on this machine, which no proxy can reach"):
        sampling(url=f"http://{host}:8000/v1", proxy="http://proxy:3128")
