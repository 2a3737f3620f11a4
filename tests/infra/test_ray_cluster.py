"""What is wrong with a Ray cluster is said before anything starts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from infra.ray_cluster import (
    CLIENT,
    CLIENT_QUESTION,
    FORK_FAILED,
    QUESTION,
    ClusterNeeds,
    connect,
    connection,
    lost_in_words,
    wants_token,
)
from specs.errors import StageError
from specs.profiles import RayProfile

pytest.importorskip("ray", reason="the extra `ray` is not installed")
SECRET = "a-token-of-at-least-thirty-two-characters"


@pytest.fixture(autouse=True)
def _no_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def _listening() -> Iterator[str]:
    """The address of a port that accepts connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _head(token: str = "") -> Iterator[str]:
    """The address of a server that answers the questions of heads, to whoever has the token."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        told = dict(context.invocation_metadata())
        if token and token not in str(told.get("authorization")):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "Authentication token is missing or incorrect")
        return b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, call: grpc.HandlerCallDetails) -> Any:
            known = call.method in (QUESTION, CLIENT_QUESTION)
            return grpc.unary_unary_rpc_method_handler(answer) if known else None

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def _problem(address: str | None = None) -> str:
    with pytest.raises(StageError) as error:
        connect(RayProfile(address=address))
    return str(error.value)


def test_an_address_that_is_missing_or_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no Ray cluster is named. Fix: set ray: {address" in _problem()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "'auto' is no address of a Ray cluster. Fix: write HOST:6379" in _problem()


def test_an_address_that_nobody_answers_and_a_machine_without_a_node() -> None:
    with _listening() as address:
        assert f"no node of the Ray cluster at {address}. Fix: run `ray start --address=" in _problem(address)
    assert f"no Ray cluster answers at {address}: " in _problem(address)


@pytest.mark.parametrize("scheme", ["", CLIENT])
def test_a_cluster_with_a_token_is_told_from_one_without(scheme: str) -> None:
    with _head() as address:
        assert not wants_token(scheme + address)
    with _head(SECRET) as address:
        assert wants_token(scheme + address)


def test_a_token_that_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with _head(SECRET) as address:
        wants = f"the Ray cluster at {CLIENT}{address} wants another token. Fix: set RAY_AUTH_MODE=token, and"
        assert wants in _problem(CLIENT + address)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 40)
        problem = _problem(CLIENT + address)
        assert wants in problem
        assert "b" * 40 not in problem


def test_a_client_whose_server_was_not_forked_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    answers: list[Exception | None] = [ConnectionAbortedError(f"RuntimeError: {FORK_FAILED}. See"), None]

    def init(address: str, **options: Any) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(ray, "init", init)
    with _head() as address:
        assert connect(RayProfile(address=CLIENT + address)) is ray
        answers[:] = [ConnectionAbortedError("another reason")]
        assert "refuses this process: another reason" in _problem(CLIENT + address)
    assert not answers


def test_a_connection_ends_with_its_block_and_keeps_the_handler_of_sigterm(ray_address: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with connection(RayProfile(address=ray_address)) as ray:
        assert len(ray.nodes()) == 3
        assert signal.getsignal(signal.SIGTERM) == before
    assert not ray.is_initialized()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_what_has_room_is_told_from_what_has_none(ray_address: str) -> None:
    with connection(RayProfile(address=ray_address)) as ray:
        fits = {
            needs: needs.fit(ray)
            for needs in (
                ClusterNeeds(1),
                ClusterNeeds(2),
                ClusterNeeds(1, nodes=2),
                ClusterNeeds(1, nodes=3),
                ClusterNeeds(1, gpus=1),
            )
        }
    assert list(fits.values()) == [True, False, True, False, False]
    assert str(ClusterNeeds(2, 1, 2**30, nodes=3)) == "3 nodes with 2 CPUs, 1 GPUs, 1.0 GiB"
    assert str(ClusterNeeds(2)) == "a worker with 2 CPUs, 0 GPUs, 0.0 GiB"


def test_a_lost_actor_is_told_in_words_without_ids_and_advice() -> None:
    lost = RuntimeError(  # as Ray 2.60 says it
        "1 worker(s) were killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.0.0.2, ID: 5e0c) was 7.6GB used / 23.5GB limit (0.32)\n"
        "OOM kill reason: Memory usage 8237801472B exceeded"
    )
    assert lost_in_words(lost) == (
        "RuntimeError: 1 worker(s) were killed due to the node running low on memory. Memory on the node"
        " (IP: 10.0.0.2) was 7.6GB used / 23.5GB limit (0.32)"
    )
    died = RuntimeError(
        "The actor died unexpectedly before finishing this task.\n\tclass_name: UnitWorker\n\tip: 10.0.0.3\n"
        "The actor died because its node has died. Node Id: cf56 health check failed"
    )
    assert lost_in_words(died) == (
        "RuntimeError on 10.0.0.3: The actor died because its node has died. health check failed"
    )
