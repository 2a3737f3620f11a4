"""Whatever a secret is made of, and however it is escaped, it is not in what is refused or redacted."""

from __future__ import annotations

import html
import json
import os
import string
from collections.abc import Callable
from unittest import mock
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specs.redaction import SHORTEST, mask_url, masked, redacted, without_credentials

CORE = "Zq7kX"
"""Stands in every secret, so that a part of one that is left is seen as well."""
VISIBLE = string.digits + string.ascii_letters + string.punctuation + "éß漢😀"
PRINTABLE = VISIBLE + " "


def secrets(characters: str) -> st.SearchStrategy[str]:
    around = st.text(characters, max_size=8)
    return st.builds("{}{}{}".format, around, st.just(CORE), around)


SCHEMES = st.from_regex(r"[a-z][a-z0-9+.-]{0,5}", fullmatch=True, alphabet=string.printable)
USERS = st.text(PRINTABLE, max_size=8).filter(lambda user: user[:1] not in ("/", "\\"))
HOSTS = st.sampled_from(["host", "host:9000/bucket", "bucket/a/b.bin", "bucket/a@b", "h/x?version=2#part"])

# Of text that holds secrets

ESCAPES: dict[str, Callable[[str], str]] = {
    "none": str,
    "JSON": json.dumps,
    "JSON with Unicode": lambda text: json.dumps(text, ensure_ascii=False),
    "JSON of PHP": lambda text: json.dumps(text).replace("/", "\\/"),
    "JSON in JSON": lambda text: json.dumps(json.dumps(text)),
    "Python": repr,
    "bytes of Python": lambda text: repr(text.encode()),
    "JSON in Python": lambda text: repr(json.dumps(text)),
    "Python in JSON": lambda text: json.dumps(repr(text)),
}
NESTED = [escape for escape in ESCAPES if escape != "none"]


def assert_not_in(text: str, *places: str) -> None:
    assert not [place for place in places if text in place]


@given(SCHEMES, USERS, secrets(PRINTABLE), HOSTS)
def test_url_with_a_password_is_refused_without_repeating_it(
    scheme: str, user: str, password: str, host: str
) -> None:
    url = f"{scheme}://{user}:{password}@{host}"
    with pytest.raises(ValueError, match="a URL with credentials in it; leave them out") as caught:
        without_credentials(url)
    assert_not_in(CORE, str(caught.value), mask_url(url), mask_url(f"--set store={url}"))


@given(SCHEMES, secrets(PRINTABLE.translate({ord(character): None for character in "/\\?#"})))
def test_a_url_with_a_user_alone_is_refused(scheme: str, user: str) -> None:
    with pytest.raises(ValueError, match="a URL with credentials in it"):
        without_credentials(f"{scheme}://{user}@host/x")


@settings(max_examples=300)
@given(st.sampled_from([*ESCAPES]), SCHEMES, USERS, secrets(VISIBLE), HOSTS)
def test_a_password_in_a_url_is_masked(escape: str, scheme: str, user: str, password: str, host: str) -> None:
    told = ESCAPES[escape](f"{scheme}://{''.join(user.split())}:{password}@{host}")
    text = masked(f"cannot open {told}: refused")
    assert_not_in(CORE, text)
    assert text.startswith("cannot open ") and text.endswith(": refused")


KEYS = """
key auth pass pwd pw pat sig signature token jwt sas password passphrase secret access_token
id_token refresh-token api_key apikey client_secret AccountKey SharedAccessSignature KEY
X-Amz-Signature X-Amz-Credential X-Amz-Security-Token X-Goog-Signature AWSAccessKeyId GoogleAccessId
"""


@settings(max_examples=400)
@given(
    key=st.sampled_from(KEYS.split()),
    before=st.sampled_from(["?", "#", "?a=1&", "?a=1&amp;", "#a=1&", ";"]),
    secret=secrets(PRINTABLE),
    escape=st.sampled_from([*ESCAPES]),
)
def test_a_secret_parameter_is_refused_and_masked(key: str, before: str, secret: str, escape: str) -> None:
    url = f"https://host/x{before}{key}={secret}"
    if not secret[0].isspace():
        with pytest.raises(ValueError, match="a URL with credentials in it") as caught:
            without_credentials(url)
        assert_not_in(CORE, str(caught.value), mask_url(url))
    secret = "".join(secret.split())
    text = masked(f"GET {ESCAPES[escape](f'https://host/x{before}{key}={secret}')} failed")
    assert_not_in(secret, text)
    assert text.startswith("GET ") and text.endswith(" failed")
    if "=" not in secret:  # else a part of it may look like the next parameter
        assert_not_in(CORE, text)


NAMES = """
password db_passwd passphrase client_secret secret aws_secret_access_key AccountKey accessToken
api-key x-amz-security-token connection_string DB_PASS MYSQL_PWD GH_PAT HF_TOKEN AZURE_STORAGE_KEY
Authorization
"""


@settings(max_examples=400)
@given(name=st.sampled_from(NAMES.split()), secret=secrets(PRINTABLE), outer=st.sampled_from([None, *NESTED]))
def test_a_quoted_value_of_a_secret_name_is_masked(name: str, secret: str, outer: str | None) -> None:
    for inner in (json.dumps, repr):
        told = inner({"first": 1, name: secret, "last": 2})
        text = masked(ESCAPES[outer](told) if outer else told)
        assert_not_in(CORE, text)
        assert "first" in text


@settings(max_examples=400)
@given(st.sampled_from(NAMES.split()), secrets(VISIBLE), st.sampled_from(["=", ": ", " = ", ":"]))
def test_a_bare_value_of_a_secret_name_is_masked(name: str, secret: str, sign: str) -> None:
    assume("=" not in secret and secret[0] not in "\"'b\\")
    text = masked(f"before {name}{sign}{secret}\nafter")
    assert_not_in(CORE, text)
    assert text.startswith("before ") and text.endswith("\nafter")


@given(
    scheme=st.sampled_from(["Basic", "Bearer", "Token", "AWS", "Digest", "ApiKey", "Other"]),
    secret=secrets(VISIBLE),
    outer=st.sampled_from([None, *NESTED]),
)
def test_an_authorisation_header_of_any_scheme_is_masked(scheme: str, secret: str, outer: str | None) -> None:
    for inner in (json.dumps, repr):
        told = inner({"Host": "h", "Authorization": f"{scheme} {secret}"})
        assert_not_in(CORE, masked(ESCAPES[outer](told) if outer else told))


# Of values of the environment


MORE_ESCAPES: dict[str, Callable[[str], str]] = ESCAPES | {
    "a URL's path": quote,
    "a URL's parameter": lambda text: quote(text, safe=""),
    "a form": quote_plus,
    "HTML": html.escape,
    "HTML in JSON": lambda text: json.dumps(html.escape(text)),
    "JSON in HTML": lambda text: html.escape(json.dumps(text)),
}
VALUES = secrets(PRINTABLE + "\t\n\x07")


@settings(max_examples=400)
@given(st.sampled_from([*MORE_ESCAPES]), VALUES)
def test_escaped_value_of_the_environment_is_replaced_by_its_name(escape: str, value: str) -> None:
    assume(len(value.strip()) >= SHORTEST)
    with mock.patch.dict(os.environ, {"DB_PASS": value}):
        text = redacted(f"sent {MORE_ESCAPES[escape](value)} to it")
    assert_not_in(CORE, text)
    assert "<DB_PASS>" in text


@given(VALUES)
def test_each_line_of_a_multiline_value_is_replaced_by_its_name(value: str) -> None:
    assume(all(len(line.strip()) >= SHORTEST for line in value.splitlines() if CORE in line))
    with mock.patch.dict(os.environ, {"PRIVATE_KEY": value}):
        assert_not_in(CORE, *map(redacted, value.splitlines()))


@given(secrets(VISIBLE))
def test_redaction_is_idempotent(secret: str) -> None:
    told = f"s3://u:{secret}@h/x https://h/x?key={secret} password={secret} "
    told += json.dumps({"Authorization": f"Token {secret}"})
    assert masked(masked(told)) == masked(told)
