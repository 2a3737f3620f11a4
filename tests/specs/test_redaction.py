"""What is secret does not leave in messages; what is not stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.redaction import Redacted, redacted, without_secrets
from specs.sources import without_credentials

SIGNED = "https://b.s3.amazonaws.com/x?X-Amz-Credential=AKIDEXAMPLE%2F20260101&X-Amz-Expires=60&X-Amz-Signature=0123abcd"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot open s3://user:pass@bucket/x", "cannot open s3://***@bucket/x"),
        ("http://user@host/a and http://other:p@host/b", "http://***@host/a and http://***@host/b"),
        (SIGNED, "https://b.s3.amazonaws.com/x?X-Amz-Credential=***&X-Amz-Expires=60&X-Amz-Signature=***"),
        ("https://h/x?sv=1&sig=abc%3D next", "https://h/x?sv=1&sig=*** next"),
        ("{'Authorization': 'Bearer abc.def', 'Host': 'h'}", "{'Authorization': 'Bearer ***', 'Host': 'h'}"),
        ("authorization: Basic dXNlcg==\nhost: h", "authorization: Basic ***\nhost: h"),
        ("{'X-Amz-Security-Token': b'FwoGZX', 'Host': 'h'}", "{'X-Amz-Security-Token': b'***', 'Host': 'h'}"),
        ("AWS4-HMAC-SHA256 Credential=AK/2026/s3, SignedHeaders=host, Signature=0a1b", "***"),
        ("the key AKIAIOSFODNN7EXAMPLE does not exist", "the key *** does not exist"),
        ("token hf_abcdefghijklmnopqrstuvwxyz was refused", "token *** was refused"),
    ],
)
def test_forms_in_which_secrets_appear(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "the tokenizer has 512 tokens; token=7 of the vocabulary",
        "user@host wrote to s3://bucket/folder@v2/x",
        "hf://datasets/owner/name@main/data",
        "step 120/400  9.1k tokens/s  loss 3.21",
        "https://host/path?version=2&signature_version=s3v4",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_values_of_the_environment_are_named_in_place_of_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abc/def+ghi")
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "abc/def+ghi-longer")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a-value-to-see")
    text = "abc/def+ghi and abc%2Fdef%2Bghi and abc/def+ghi-longer and a-value-to-see"
    assert redacted(text) == "<AWS_SECRET_ACCESS_KEY> and <AWS_SECRET_ACCESS_KEY> and <MY_SERVICE_PASSWORD> and a-value-to-see"


@pytest.mark.parametrize("kind", [PermissionError, ValueError])
def test_an_error_behind_an_error_is_looked_at_too(kind: type[Exception]) -> None:
    try:
        try:
            raise kind("refused: s3://user:pass@bucket")
        except Exception as error:
            raise kind("the stage failed") from error
    except Exception as error:
        shown = without_secrets(error)
    assert type(shown) is (OSError if kind is PermissionError else Redacted)
    assert str(shown) == f"{kind.__name__}: the stage failed"
    assert (shown.__cause__, shown.__context__) == (None, None)


def test_an_error_without_secrets_stays_itself() -> None:
    error = ValueError("no space left")
    assert without_secrets(error) is error


@pytest.mark.parametrize("url", ["s3://user:pass@bucket/x", "https://user@host/x", SIGNED])
def test_a_url_that_carries_credentials_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match="a URL with credentials in it; leave them out") as caught:
        without_credentials(url)
    assert url not in str(caught.value)


def test_values_of_the_credentials_file_are_named_in_place_of_being_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    assert redacted("sent tokenofone") == "sent tokenofone"  # there is no file
    file.write_text("[default]\nregion = anywhere\n[one]\naws_session_token = tokenofone\naws_secret_access_key=a/b+c=d%\n")
    assert redacted("anywhere: sent tokenofone, a/b+c=d% of") == "anywhere: sent <AWS_SESSION_TOKEN>, <AWS_SECRET_ACCESS_KEY> of"
