"""Completions from a server that works, and from one that does not."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from apertus_model.completion_server import ServerGenerator
from apertus_model.data.rows import Rows
from apertus_model.prompt_format import GenerationError, OwnFormat
from apertus_model.server_client import TRIES, ServerFailure, asked_to_wait
from infra.store import Artifact, Attempt
from specs.stages.preference_data import Sampling
from tests.apertus_model.openai_server import (
    Fault,
    Handler,
    Server,
    changed,
    empty,
    half,
    hangs,
    hangs_up,
    no_json,
    replies,
    serving,
    status,
)
from tests.apertus_model.preference_artifacts import encoder_of, put_model, put_rows

KEY = "sk-hunter2-hunter2"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def row(index: int) -> dict[str, Any]:
    return {"id": str(index), "tokens": [1, index], "messages": [{"role": "user", "content": f"q{index}"}]}


ROWS = [row(index) for index in range(3)]


def generator(
    tokenizer: Artifact, url: str, waits: list[float] | None = None, **more: Any
) -> ServerGenerator:
    stated = {"url": url, "model": "ours", "requests": 2} | more.pop("server", {})
    sampling = Sampling(**{"n": 2, "max_new_tokens": 6, "engine": "server", "server": stated} | more)
    encoder = encoder_of(tokenizer)
    own = OwnFormat(tokenizer.local("tokenizer.json"), encoder.end_of_turn_id, 10)
    pause = ([] if waits is None else waits).append
    return ServerGenerator(sampling, own, lambda index: 100 + index, pause)


def expected(tokenizer: Artifact, *asked: Any) -> list[list[dict[str, Any]]]:
    encoder = encoder_of(tokenizer)
    found = []
    for one in asked:
        texts = [f"{number} {one}" for number in range(2)]
        tokens = [encoder.completion(text).tolist() for text in texts]
        found.append(
            [
                {"text": texts[0], "tokens": tokens[0], "finished": True},
                {"text": texts[1], "tokens": tokens[1][:-1], "finished": False},
            ]
        )
    return found


def test_a_server_is_sent_token_ids_with_the_sampling_and_a_seed_for_every_prompt(
    tokenizer: Artifact, server: Server
) -> None:
    asked = generator(tokenizer, server.url, temperature=0.5, top_p=0.9)
    assert asked.complete(ROWS, first=7) == expected(tokenizer, [1, 0], [1, 1], [1, 2])
    assert sorted(server.requests, key=lambda one: one["seed"]) == [
        {"model": "ours", "n": 2, "temperature": 0.5, "top_p": 0.9, "max_tokens": 6, "seed": 107 + index,
         "prompt": [1, index], "return_token_ids": True}
        for index in range(3)
    ]  # fmt: skip
    assert set(server.paths) == {"/v1/completions"} and set(server.keys) == {None}


def test_a_server_with_a_model_of_its_own_is_sent_messages_and_the_key(
    tokenizer: Artifact, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_API_KEY", KEY)
    asked = generator(tokenizer, server.url, server={"api": "chat", "key": "SERVER_API_KEY"})
    assert asked.complete(ROWS[:1], first=0) == expected(tokenizer, "q0")
    assert server.requests[0]["messages"] == [{"role": "user", "content": "q0"}]
    assert (server.paths, server.keys) == (["/v1/chat/completions"], [f"Bearer {KEY}"])


def test_ids_that_a_server_gives_are_kept_as_they_were_sampled(
    tokenizer: Artifact, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = encoder_of(tokenizer).end_of_turn_id
    sampled = [[300, 301], [300, 301, end], [300]]
    ended = ["stop", "stop", "length"]
    choices = [
        {"index": index, "text": "not read", "token_ids": ids, "finish_reason": reason}
        for index, (ids, reason) in enumerate(zip(sampled, ended, strict=True))
    ]
    monkeypatch.setattr(Handler, "answer", lambda self, request: {"choices": choices})
    [answers] = generator(tokenizer, server.url, n=3).complete(ROWS[:1], first=0)
    text = encoder_of(tokenizer).decode([300, 301])
    assert answers[:2] == [{"text": text, "tokens": [300, 301, end], "finished": True}] * 2
    assert (answers[2]["tokens"], answers[2]["finished"]) == ([300], False)


def test_greedy_completions_are_asked_for_once(tokenizer: Artifact, server: Server) -> None:
    [answers] = generator(tokenizer, server.url, temperature=0, n=3).complete(ROWS[:1], first=0)
    assert server.requests[0]["n"] == 1
    assert [one["text"] for one in answers] == ["0 [1, 0]"] * 3


def test_requests_are_in_flight_up_to_the_limit(tokenizer: Artifact, server: Server) -> None:
    together = threading.Barrier(2, timeout=30)  # an answer waits until two are asked for
    server.pause = together.wait
    generator(tokenizer, server.url).complete([row(index) for index in range(8)], first=0)
    assert server.most == 2


@pytest.mark.parametrize(
    "fault",
    [status(429), status(500), status(503), half, no_json, empty, hangs_up],
    ids=["429", "500", "503", "half", "half a line", "no choices", "hangs up"],
)
def test_what_may_pass_is_asked_again_and_no_answer_is_lost(
    tokenizer: Artifact, server: Server, fault: Fault
) -> None:
    server.faults, waits = [fault, None, fault], list[float]()
    found = generator(tokenizer, server.url, waits).complete(ROWS, first=0)
    assert found == expected(tokenizer, [1, 0], [1, 1], [1, 2])
    assert len(server.requests) == 5
    assert sum(waits) in (2.0, 3.0)  # of two prompts, or twice of one


def test_a_server_that_does_not_answer_is_asked_again(tokenizer: Artifact, server: Server) -> None:
    server.faults = [hangs]
    found = generator(tokenizer, server.url, server={"timeout": "0.5s"}).complete(ROWS[:1], first=0)
    assert found == expected(tokenizer, [1, 0])
    assert len(server.requests) == 2


def test_the_wait_that_a_server_asks_for_is_kept(tokenizer: Artifact, server: Server) -> None:
    server.faults, waits = [status(429, Retry_After="17"), status(500), status(429)], list[float]()
    generator(tokenizer, server.url, waits).complete(ROWS[:1], first=0)
    assert waits == [17.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("99999", 600.0),
        ("Mon, 23 Nov 2026 12:00:30 GMT", 30.0),
        ("Mon, 23 Nov 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("nan", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert asked_to_wait(header, datetime(2026, 11, 23, 12, tzinfo=UTC)) == seconds


def test_retries_are_bounded(tokenizer: Artifact, server: Server) -> None:
    server.faults, waits = [status(500)] * 100, list[float]()
    asked = generator(tokenizer, server.url, waits, server={"requests": 1})
    with pytest.raises(ServerFailure, match=rf"did not answer prompt 0 in {TRIES} tries: HTTP 500"):
        asked.complete(ROWS[:1], first=0)
    assert len(server.requests) == TRIES
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]


def test_no_server_is_a_failure_after_the_retries(tokenizer: Artifact) -> None:
    with serving() as gone:
        url = gone.url
    with pytest.raises(ServerFailure, match=r"ConnectError.*Finished units are stored"):
        generator(tokenizer, url).complete(ROWS, first=0)


@pytest.mark.parametrize("code", [400, 401, 404, 307])
def test_what_cannot_pass_is_one_message_without_the_key(
    tokenizer: Artifact, server: Server, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_API_KEY", KEY)
    server.faults = [status(code, Location="http://127.0.0.1:9/")]
    asked = generator(tokenizer, server.url, server={"key": "SERVER_API_KEY"})
    with pytest.raises(
        GenerationError, match=rf"refuses model 'ours' with HTTP {code}.*Fix: correct url, model"
    ) as told:
        asked.complete(ROWS[:1], first=0)
    assert KEY not in str(told.value)
    assert len(server.requests) == 1


def test_a_server_that_ignores_n_is_a_message(
    tokenizer: Artifact, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.apertus_model.openai_server.texts_of", lambda request: ["one"])
    with pytest.raises(GenerationError, match="gives 1 completions where n: 2 are asked for"):
        generator(tokenizer, server.url).complete(ROWS[:1], first=0)


def test_a_key_that_is_not_set_is_a_message_before_anything_is_sent(
    tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERVER_API_KEY", raising=False)
    with pytest.raises(GenerationError, match="SERVER_API_KEY, which is not set"):
        generator(tokenizer, "http://host", server={"key": "SERVER_API_KEY"})


def test_units_that_were_answered_are_never_asked_for_again(
    bench: Any, tokenizer: Artifact, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apertus_model.server_client.TRIES", 1)
    prompts = put_rows(bench, "prompts", "p", ROWS, {"end_of_turn_id": 68, "pad_id": 10})
    stated = {"url": server.url, "model": "ours", "api": "chat"}
    spec = {
        "sampling": {"n": 2, "max_new_tokens": 6, "engine": "server", "server": stated},
        "prompts_per_unit": 1,
    }
    inputs = {"prompts": prompts, "tokenizer": tokenizer}
    server.faults = [None, status(500)]
    with pytest.raises(ServerFailure):
        bench.run("completions", "c", spec, inputs)
    artifact = bench.run("completions", "c", spec, inputs, attempt="second", attempt_class=Attempt)
    assert [one["messages"][0]["content"] for one in server.requests] == ["q0", "q1", "q1", "q2"]
    assert [one["completions"] for one in Rows(artifact)] == expected(tokenizer, "q0", "q1", "q2")


def test_a_server_with_the_stages_model_is_asked_without_its_weights(
    bench: Any, tokenizer: Artifact, server: Server
) -> None:
    prompts = put_rows(bench, "prompts", "p", ROWS, {"end_of_turn_id": 68, "pad_id": 10})
    model = put_model(bench, tokenizer)
    (model.local("model.safetensors")).unlink()
    spec = {"sampling": {"n": 2, "max_new_tokens": 6, "engine": "server"}, "prompts_per_unit": 64}
    spec["sampling"] |= {"server": {"url": server.url, "model": "ours"}}  # type: ignore[operator]
    artifact = bench.run("completions", "c", spec, {"model": model, "prompts": prompts})
    assert [one["completions"] for one in Rows(artifact)] == expected(tokenizer, [1, 0], [1, 1], [1, 2])


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_answer_that_no_model_can_have_given_is_never_a_completion(
    tokenizer: Artifact, server: Server, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field of an answer is left out, repeated, and of each other type or range. What remains possible
    is an empty text, and a server that gives no ids or another number of completions."""
    monkeypatch.setattr("apertus_model.server_client.TRIES", 1)
    said = {"message": {"content": "one"}} if api == "chat" else {"text": "one", "token_ids": [300, 301]}
    choice = {"index": 0, "finish_reason": "stop"} | said
    asked = generator(tokenizer, server.url, n=1, server={"api": api})
    whole = [replies({"choices": [choice]})]
    server.faults = [*whole]
    [[usual]] = asked.complete(ROWS[:1], first=0)
    end = encoder_of(tokenizer).end_of_turn_id
    possible = {".index left out", ".message.content", ".text", ".text left out", ".finish_reason"}
    tried = 0
    for place, document in changed({"choices": [choice]}):
        field = place.removeprefix(".choices[0]")
        server.faults = [replies(document)]
        tried += 1
        try:
            [[found]] = asked.complete(ROWS[:1], first=0)
        except ServerFailure as error:
            assert "did not answer prompt 0 in 1 tries: an answer that cannot be read: " in str(error), place
        except GenerationError as error:
            assert "[0] repeated" in place and "gives 2 completions where n: 1" in str(error)
        else:
            ids = found["tokens"]
            assert field in possible or field.startswith(".token_ids"), place
            assert found == usual or not found["finished"] or ids[-1] == end, place
            assert len(ids) <= 7 and all(0 <= one < encoder_of(tokenizer).vocab_size for one in ids), place
    assert tried > 40


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([300, 2**70], "token_ids of a choice has 1180591620717411303424, not one of"),
        ([-1], "token_ids of a choice has -1, not one of"),
        ([300] * 7, "token_ids of a choice has 7 tokens; max_tokens is 6"),
    ],
)
def test_ids_that_were_not_asked_for_are_a_broken_answer_that_is_named(
    tokenizer: Artifact, server: Server, ids: list[int], told: str
) -> None:
    choice = {"index": 0, "finish_reason": "length", "text": "one", "token_ids": ids}
    server.faults = [replies({"choices": [choice]})] * TRIES
    with pytest.raises(
        ServerFailure, match=rf"/completions did not answer prompt 0 in {TRIES} tries.*{told}"
    ):
        generator(tokenizer, server.url, n=1).complete(ROWS[:1], first=0)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_compressed_answer_is_refused_before_it_is_expanded(
    tokenizer: Artifact, server: Server, layers: int
) -> None:
    body = b" " * 2**24
    for _ in range(layers):
        body = gzip.compress(body)
    encoding = ", ".join(["gzip"] * layers)
    server.faults = [lambda handler: handler.say(200, body, Content_Encoding=encoding)] * TRIES
    with pytest.raises(
        ServerFailure, match=f"an answer in Content-Encoding '{encoding}', which was not asked"
    ):
        generator(tokenizer, server.url).complete(ROWS[:1], first=0)
    server.faults = [lambda handler: handler.say(200, body, Content_Encoding=encoding)]
    assert generator(tokenizer, server.url).complete(ROWS[:1], first=0) == expected(tokenizer, [1, 0])
    assert {headers["Accept-Encoding"] for headers in server.headers} == {"identity"}


PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_requests_go_to_the_server_and_to_no_proxy_of_the_environment(
    tokenizer: Artifact, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(host) as there:
        found = generator(tokenizer, there.url).complete(ROWS[:1], first=0)
    assert found == expected(tokenizer, [1, 0])


def test_requests_go_through_the_proxy_that_the_recipe_names(tokenizer: Artifact, server: Server) -> None:
    proxy = server.url.removesuffix("/v1")
    asked = generator(tokenizer, "http://model.example/v1", server={"proxy": proxy})
    assert asked.complete(ROWS[:1], first=0) == expected(tokenizer, [1, 0])
    assert server.paths == ["http://model.example/v1/completions"]
