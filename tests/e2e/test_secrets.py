"""Secrets of the environment and of a credentials file are used and written nowhere: a run over object
storage, with a stage that fails while storage tells all, and commands that read the store."""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.server import ThreadedMotoServer

from tests.e2e.conftest import Run

RECIPE = """\
name: planted
retries: {attempts: 0}
sources: {code: {url: "installed:stdlib", format: code, include: [json/*.py]}}
stages:
  tokenizer: {kind: tokenizer, sources: [code], vocab_size: 384, bytes_per_source: 20_000}
  corpus: {kind: corpus, tokenizer: tokenizer, sources: {code: {pii: false, holdout: 0.3}}}
  main: {kind: mixture, weights: {corpus/code: 1}, max_repetition: 20}
"""
NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "PREFECT_API_KEY",
)


class Telling:
    """S3 that refuses what is written below `mixture/*/attempts`, and repeats in its answer what it was
    sent."""

    def __init__(self, application: Any) -> None:
        self.application = application
        self.told: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        if (
            environ["REQUEST_METHOD"] not in ("PUT", "POST")
            or "/mixture/" not in path
            or "/attempts/" not in path
        ):
            return self.application(environ, start_response)
        sent = {name: value for name, value in environ.items() if name.startswith("HTTP_")}
        text = f"refused: {sent}; the token was {environ.get('HTTP_X_AMZ_SECURITY_TOKEN')}"
        self.told.append(text)
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        error = f"<Error><Code>AccessDenied</Code><Message>{escaped}</Message></Error>"
        return [f"<?xml version='1.0'?>{error}".encode()]


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Telling]]:
    application = Telling(DomainDispatcherApplication(create_backend_app))
    monkeypatch.setattr(
        "moto.moto_server.threaded_moto_server.DomainDispatcherApplication", lambda create: application
    )
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}", application
    server.stop()


def forms(secret: str) -> list[bytes]:
    """How a value may be spelled where it is written."""
    encoded = base64.b64encode(secret.encode()).rstrip(b"=")
    return [secret.encode(), quote(secret, safe="").encode(), encoded, repr(secret)[1:-1].encode()]


def from_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """From now on the storage client reads its credentials from a file, which is new; they are not those
    of the environment before."""
    secrets = {name: f"FILED{uuid.uuid4().hex.upper()}" for name in NAMES if name.startswith("AWS_")}
    (folder / "credentials").write_text(
        "\n".join(["[default]", *(f"{name.lower()} = {value}" for name, value in secrets.items())])
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    for name in secrets:
        monkeypatch.delenv(name)
    return {f"{name} of the file": value for name, value in secrets.items()}


@pytest.mark.slow
def test_no_secret_is_written_anywhere(
    telling: tuple[str, Telling],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint, storage = telling
    secrets = {name: f"planted/{name.lower()}+{uuid.uuid4().hex}" for name in NAMES}
    secrets["AWS_ACCESS_KEY_ID"] = f"PLANTED{uuid.uuid4().hex.upper()}"
    secrets["the URL"] = f"url/password@{uuid.uuid4().hex}"
    for name in NAMES:
        monkeypatch.setenv(name, secrets[name])
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("APERTUS_STORE", raising=False)
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="bucket")
    recipe = tmp_path / "planted.yaml"
    recipe.write_text(RECIPE)
    home = tmp_path / "home"
    home.mkdir()
    store = ("--store", "s3://bucket/store")

    run = Run(home, "run", str(recipe), *store)
    assert run.wait() == 1, run.text
    assert "failed: main:" in run.text, run.text
    assert storage.told
    assert all(secrets["AWS_SESSION_TOKEN"] in text for text in storage.told)  # storage did tell
    assert "<AWS_SESSION_TOKEN>" in run.text  # and the message came through, without it

    with_password = f"s3://user:{secrets['the URL']}@bucket/store"
    with_key = f"https://host/x?key={quote(secrets['the URL'], safe='')}"
    urls = [
        f"sources.code.url={with_password}",
        f"sources.code.url={with_key}",
        f"stages.tokenizer.from=hf:{with_password}",
    ]
    for arguments in (
        ("--store", with_password),
        ("--store", with_key),
        *(("--set", x) for x in [f"store={with_password}", *urls]),
    ):
        refused = Run(home, "run", str(recipe), *arguments)
        assert refused.wait(60) == 2, refused.text
        assert "a URL with credentials in it" in refused.text
        assert not [form for form in forms(secrets["the URL"]) if form in refused.text.encode()]
    written = tmp_path / "written.yaml"
    written.write_text(f"store: {with_password}\n{RECIPE}")
    refused = Run(home, "plan", str(written))
    assert refused.wait(60) == 2, refused.text
    written.unlink()
    secrets |= from_a_file(tmp_path_factory.mktemp("credentials"), monkeypatch)
    for command in (("status",), ("plan", "--json")):
        assert Run(home, command[0], str(recipe), *command[1:], *store).wait(60) == 0
    assert Run(home, "report", str(recipe), *store, "-o", str(home / "report.html")).wait(60) == 0
    assert run.no_process_is_left(10)

    places = {
        f"file {path.relative_to(tmp_path)}": path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket"):
        for entry in page.get("Contents", []):
            places[f"stored {entry['Key']}"] = (
                client.get_object(Bucket="bucket", Key=entry["Key"])["Body"].read() + entry["Key"].encode()
            )
    assert any(Path(name).match("apertus/prefect-*.db") for name in places)
    assert any("/mixture/" in name and "/logs/" in name for name in places)
    assert any(name.endswith("report.html") for name in places)
    found = [
        (name, place)
        for name, secret in secrets.items()
        for place, data in places.items()
        if any(f in data for f in forms(secret))
    ]
    assert found == []
    assert not [name for name in os.listdir(home) if name.startswith("apertus-")]  # no scratch is left
