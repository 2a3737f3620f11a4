"""What is secret does not leave in messages; what is not stays readable."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from specs.redaction import Redacted, RedactedRecord, mask_url, redacted, without_credentials, without_secrets

SIGNED = "https://b.s3.amazonaws.com/x?X-Amz-Credential=AKIDEXAMPLE%2F20260101&X-Amz-Expires=60&X-Amz-Signature=0123abcd"


@pytest.mark.parametrize(
    ("text", "mask_url"),
    [
        ("cannot open s3://user:pass@bucket/x", "cannot open s3://***@bucket/x"),
        ("http://user@host/a and http://other:p@host/b", "http://***@host/a and http://***@host/b"),
        (SIGNED, "https://b.s3.amazonaws.com/x?X-Amz-Credential=***&X-Amz-Expires=60&X-Amz-Signature=***"),
        ("https://h/x?sv=1&sig=abc%3D next", "https://h/x?sv=1&sig=*** next"),
        ("{'Authorization': 'Bearer abc.def', 'Host': 'h'}", "{'Authorization': 'Bearer ***', 'Host': 'h'}"),
        ("authorization: Basic dXNlcg==\nhost: h", "authorization: Basic ***\nhost: h"),
        ("{'X-Amz-Security-Token': b'FwoGZX', 'Host': 'h'}", "{'X-Amz-Security-Token': b'***', 'Host': 'h'}"),
        ("AWS4-HMAC-SHA256 Credential=AK/s3, SignedHeaders=host, Signature=0a1b", "AWS4-HMAC-SHA256 ***"),
        ("the key AKIAIOSFODNN7EXAMPLE does not exist", "the key *** does not exist"),
        ("token hf_abcdefghijklmnopqrstuvwxyz was refused", "token *** was refused"),
        ("with ghp_abcdefghijklmnopqrstuvwxyz0123456789", "with ***"),
        (
            "s3://KEY:wJalr/SECRET@bucket/x and s3://user:abc@SECRETTAIL@bucket/x",
            "s3://***@bucket/x and s3://***@bucket/x",
        ),
        ("no folder 's3:/KEY:wJalr/SECRET@bucket/x'", "no folder 's3:/***@bucket/x'"),
        ("https://user:wJalr/SECRET@host/x?key=SECRET&b=2", "https://***@host/x?key=***&b=2"),
        ("https://host/x?key=a:b@c&b=2", "https://***&b=2"),  # the end of a password, or of the parameter
        ("GET /x?auth=abc#access_token=def HTTP/1.1", "GET /x?auth=***#access_token=*** HTTP/1.1"),
        (
            "AccountName=a;AccountKey=ab+/c==;EndpointSuffix=core",
            "AccountName=a;AccountKey=***;EndpointSuffix=core",
        ),
        (
            "client_secret=abc&grant_type=code, password: 'a b', retries=3",
            "client_secret=***&grant_type=code, password: '***', retries=3",
        ),
        ('{"Authorization": "Token X", "Host": "h"}', '{"Authorization": "Token ***", "Host": "h"}'),
        (
            r'"{\"Authorization\": \"Token a\\\"b\", \"Host\": \"h\"}"',
            r'"{\"Authorization\": \"Token ***\", \"Host\": \"h\"}"',
        ),
        (
            "[('authorization', 'Basic abc'), ('host', 'h')]",
            "[('authorization', 'Basic ***'), ('host', 'h')]",
        ),
        (
            "DB_PASS=hunter2 GH_PAT=x MYSQL_PWD: y PATH=/usr/bin",
            "DB_PASS=*** GH_PAT=*** MYSQL_PWD: *** PATH=/usr/bin",
        ),
    ],
)
def test_forms_in_which_secrets_appear(text: str, mask_url: str) -> None:
    assert redacted(text) == mask_url


@pytest.mark.parametrize(
    "text",
    [
        "the tokenizer has 512 tokens; token=7 of the vocabulary",
        "user@host wrote to s3://bucket/folder@v2/x",
        "hf://datasets/owner/name@main/data",
        "step 120/400  9.1k tokens/s  loss 3.21",
        "https://host/path?version=2&signature_version=s3v4",
        "max_tokens=512 max_new_tokens: 64 seconds_per_token=0.2 eos_token='</s>' {'pad_token': '<pad>'}",
        "PATH=/usr/bin:/home/a@b/bin TOKENIZERS_PARALLELISM=true; tokenizer: bpe, tokenizer_path=/x",
        "{'key': 'pretrain/1'} {\"key\": \"value\"} key=abc KeyError: 'key' keys: 3 lambda key: key[0]",
        "monkey=1 keyboard=qwerty ?monkey=1&keyboard=2&max_tokens=5&page_token=3 turkey: 3 hotkey=F1",
        "hf_folder_of_the_whole_model and ghs_are_not_all_of_them",
        "secretary: x; passenger=3; compass=5; forward_pass=0.3 s; pass 2 of 3; author: me",
        'use_auth_token=None hub_token=None password=None {"client_secret": null}',
        "pretrain@step=9 at http://127.0.0.1:4200/api of hf:org/name@rev; /a@b/x s3://bucket/user@host/x",
        "/etc/passwd: a profile is a mapping",
        "rdzv tcp://[::1]:29500 -v /data:/b@c:ro sizes 3:/4",
    ],
)
def test_other_text_is_not_redacted(text: str) -> None:
    assert redacted(text) == text


def test_values_of_the_environment_are_replaced_by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abc/def+ghi")
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "abc/def+ghi-longer")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a-value-to-see")
    monkeypatch.setenv("MAX_TOKENS", "1000000")
    text = "abc/def+ghi and abc%2Fdef%2Bghi and abc/def+ghi-longer and a-value-to-see"
    assert (
        redacted(text)
        == "<AWS_SECRET_ACCESS_KEY> and <AWS_SECRET_ACCESS_KEY> and <MY_SERVICE_PASSWORD> and a-value-to-see"
    )


SECRET_NAMES = """
DB_PASS MYSQL_PWD GH_PAT SSH_PASSPHRASE AZURE_STORAGE_KEY AZURE_STORAGE_KEY_2 PGPASSWORD
SSHPASS PREFECT_API_AUTH_STRING PREFECT_SERVER_API_AUTH_STRING
FSSPEC_S3_KEY REGISTRY_AUTH MY_CREDS HF_TOKEN AWS_ACCESS_KEY_ID
AZURE_STORAGE_CONNECTION_STRING GITHUBTOKEN db_pass APIKEY
"""


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_variables_that_are_named_like_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "hunter-2")
    assert redacted("it was hunter-2") == f"it was <{name}>"


OTHER_NAMES = """
PATH PWD OLDPWD MAX_TOKENS TOKENIZERS_PARALLELISM KEYBOARD MONKEY COMPASS BYPASS SSH_AUTH_SOCK
KEYS_DIR GOOGLE_APPLICATION_CREDENTIALS AWS_SHARED_CREDENTIALS_FILE AUTHOR PATTERN PASSENGER
OS_AUTH_URL SSH_KEY_PATH
"""


@pytest.mark.parametrize("name", OTHER_NAMES.split())
def test_variables_that_only_look_like_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/some/where")
    assert redacted("it is /some/where") == "it is /some/where"


def test_values_under_six_characters_are_not_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASS", "a")
    monkeypatch.setenv("GH_PAT", "train")
    monkeypatch.setenv("MY_TOKEN", "\n step \n")
    assert redacted("a plan to train; the next step") == "a plan to train; the next step"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HTTPS_PROXY", "http://me:hunter/2@proxy:8080", "hunter/2"),
        ("FSSPEC_S3", '{"client_kwargs": {}, "secret": "hunter-2"}', "hunter-2"),
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey=hunter==;Endpoint=b", "hunter=="),
        ("SSH_PRIVATE_KEY", "-----BEGIN-----\nhunter-2\n-----END-----\n", "hunter-2"),
    ],
)
def test_secret_inside_a_value_is_replaced_alone(name: str, value: str, secret: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        assert redacted(f"it was '{secret}'") == f"it was '<{name}>'"


SECRET = b"hunter-\xff2"


def test_value_that_is_not_utf_8_is_replaced_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASS", os.fsdecode(SECRET))
    assert redacted(f"was {os.fsdecode(SECRET)} and {SECRET!r}") == "was <DB_PASS> and b'<DB_PASS>'"


@pytest.mark.parametrize("kind", [PermissionError, ValueError])
def test_cause_of_an_error_is_redacted_too(kind: type[Exception]) -> None:
    try:
        try:
            raise kind("refused: s3://user:pass@bucket")
        except Exception as error:
            raise kind("the stage failed") from error
    except Exception as error:
        mask_url = without_secrets(error)
    assert type(mask_url) is (OSError if kind is PermissionError else Redacted)
    assert str(mask_url) == f"{kind.__name__}: the stage failed"
    assert (mask_url.__cause__, mask_url.__context__) == (None, None)


def test_an_error_without_secrets_stays_itself() -> None:
    error = ValueError("no space left")
    assert without_secrets(error) is error


def test_lines_and_tracebacks_of_a_log_show_no_secret() -> None:
    record = RedactedRecord("x", logging.WARNING, "x.py", 1, "again: %s", ("https://h/x?key=hunter2",), None)
    assert logging.Formatter().format(record) == "again: https://h/x?key=***"
    try:
        raise OSError("https://h/x?key=hunter2")
    except OSError:
        record = RedactedRecord("x", logging.ERROR, "x.py", 1, "it failed", (), sys.exc_info())
    text = logging.Formatter().format(record)
    assert text.startswith("it failed\nTraceback") and text.endswith("OSError: https://h/x?key=***")


REFUSED = """
s3://user:pass@bucket/x s3://user:ab/pass@bucket/x s3://user:ab@pass@bucket/x https://user@host/x
https://host/x?key=pass https://host/x#access_token=pass simplecache::s3://user:p/ass@bucket
"""
AMBIGUOUS = "https://localhost:9000/bucket/user@host/x s3://bucket/12:30@x zip://a@b/x::s3://bucket/y"


@pytest.mark.parametrize("url", [*REFUSED.split(), *AMBIGUOUS.split(), SIGNED, "s3://u:p ass@bucket/x"])
def test_a_url_that_carries_credentials_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match="a URL with credentials in it; leave them out") as caught:
        without_credentials(url)
    assert "write %40 for the '@'" in str(caught.value)
    assert "pass@" not in str(caught.value) and "://" not in str(caught.value)


TAKEN = """
/data/a@b/x /data/a:b@c a@b s3://bucket/user@host/x hf:org/name@rev
hf://datasets/org/name@rev/a pretrain@step=9 file:///data/12:30/user@host memory:///a:b@c
http://localhost:9000/bucket/x http://[::1]:9000/x installed:stdlib/a@b
https://host:80/a%40b?version=2&max_tokens=5 simplecache::s3://bucket/a@b
s3://arn:aws:s3:eu-west-1:1234:accesspoint/name/x sft@best:val_loss/corpus/code
https://host/monkey=1?keyboard=1 s3://bucket/password/token=5/key=7
"""


@pytest.mark.parametrize("url", TAKEN.split())
def test_url_or_name_without_credentials_is_accepted(url: str) -> None:
    assert without_credentials(url) == mask_url(url) == url


def test_values_of_the_credentials_file_are_replaced_by_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    assert redacted("sent tokenofone") == "sent tokenofone"  # there is no file
    file.write_text(
        "[default]\nregion = anywhere\n[one]\naws_session_token ="
        " tokenofone\naws_secret_access_key=a/b+c=d%\n"
    )
    assert (
        redacted("anywhere: sent tokenofone, a/b+c=d% of")
        == "anywhere: sent <AWS_SESSION_TOKEN>, <AWS_SECRET_ACCESS_KEY> of"
    )
