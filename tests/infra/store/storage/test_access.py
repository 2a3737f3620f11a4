"""The first mistakes with remote storage: each names the store and what mends it, without a second try."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import s3fs

from infra.store import Store, StoreError
from infra.store.inputs import SourceError, list_source
from infra.store.storage import retry
from infra.store.storage.access import fix_of
from specs.sources import SourceSpec

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
MISTAKES = [
    ({}, "s3://bucket/x", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
    ({"AWS_ACCESS_KEY_ID": "a"}, "s3://bucket/x", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ({"AWS_PROFILE": "nope"}, "s3://bucket/x", "name a profile of ~/.aws/config in AWS_PROFILE"),
    (KEYS, "s3://no bucket!/x", "name a bucket that exists"),
    (
        KEYS | {"AWS_ENDPOINT_URL": "localhost:1"},
        "s3://bucket/x",
        "AWS_ENDPOINT_URL, which begins with http://",
    ),
    (KEYS | {"FSSPEC_S3": '{"no_such": 1}'}, "s3://bucket/x", "correct FSSPEC_S3"),
    (KEYS | {"FSSPEC_S3": "{key"}, "s3://bucket/x", "FSSPEC_S3 is not JSON"),
    (KEYS | {"FSSPEC_S3": "[1]"}, "s3://bucket/x", "FSSPEC_S3 is not JSON"),
]


@pytest.fixture(params=MISTAKES, ids=lambda case: case[2][:30])
def mistake(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """The url and the fix of a mistake that the environment now has."""

    def again(seconds: float) -> None:
        raise AssertionError("a second try")

    monkeypatch.setattr(retry, "_sleep", again)
    environment, url, fix = request.param
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "FSSPEC_S3", *KEYS):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", **environment}.items():
        monkeypatch.setenv(name, value)
    settings = {"no_such": 1} if "no_such" in environment.get("FSSPEC_S3", "") else {}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)  # which fsspec reads when it is imported
    s3fs.S3FileSystem.clear_instance_cache()
    return url, fix


def test_a_store_that_cannot_be_reached_is_named_with_the_fix(mistake: tuple[str, str]) -> None:
    url, fix = mistake
    with pytest.raises(StoreError) as caught:
        Store.open(url)
    assert f"cannot open the store '{url}'" in str(caught.value) and fix in str(caught.value)


def test_a_source_that_cannot_be_reached_is_named_with_the_fix(mistake: tuple[str, str]) -> None:
    url, fix = mistake
    with pytest.raises(SourceError) as caught:
        list_source(SourceSpec(url=url, format="text"))
    assert url in str(caught.value) and fix in str(caught.value)


@pytest.mark.parametrize(
    ("name", "url", "fix"),
    [
        ("GoogleAuthError", "gs://bucket/x", "set GOOGLE_APPLICATION_CREDENTIALS"),
        ("ClientAuthenticationError", "abfs://container/x", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("RepositoryNotFoundError", "hf://datasets/a/b@1", "set HF_TOKEN"),
        ("SSOError", "s3a://bucket/x", "set AWS_ACCESS_KEY_ID"),
        ("EndpointConnectionError", "s3://bucket/x", None),
        ("NoCredentialsError", "/local", None),
    ],
)
def test_mistakes_are_told_from_faults_by_the_names_of_errors(name: str, url: str, fix: str | None) -> None:
    error = type("Special", (type(name, (Exception,), {}),), {})("text")
    found = fix_of(error, url)
    assert found is None if fix is None else found is not None and found.startswith(fix)
