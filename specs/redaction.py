"""Secrets stay out of what is said and written: messages of other libraries pass through here before they reach a log, a terminal, an
error or Prefect.

Invariant: in redacted text there is no value of an environment variable that is named like a secret or of the credentials file of S3, no
password of a URL, no signature of a signed one, and no authorisation header. What is not secret stays readable.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from pathlib import Path
from urllib.parse import quote

SECRET_NAMES = re.compile(
    r"SECRET|TOKEN(?!IZ)|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CONNECTION_STRING", re.IGNORECASE
)
NOT_SECRET = re.compile(r"_FILE$|_PATH$|_DIR$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
SHORTEST = 6
"""Characters from which a value is taken for a secret: `test` and `1` stand in too many texts."""

SIGNED = r"X-Amz-(?:Signature|Credential|Security-Token)|X-Goog-(?:Signature|Credential)|AWSAccessKeyId|GoogleAccessId|Signature|sig|token"
SIGNED += r"|access_token|api_?key|password"
_PATTERNS = (
    (re.compile(r"(\w://)[^/\s'\"@]+@"), r"\1***@"),
    (re.compile(rf"([?&](?:{SIGNED})=)[^&\s'\"<>]+", re.IGNORECASE), r"\1***"),
    (re.compile(r"(AWS4-HMAC-SHA256\s+)?Credential=\S+?,\s*SignedHeaders=\S+?,\s*Signature=\w+"), "***"),
    (re.compile(r"((?:proxy-)?authorization['\"]?\s*[:=]\s*(?:b?['\"])?(?:(?:Bearer|Basic|AWS)\s+)?)[^\s'\",}]+", re.IGNORECASE), r"\1***"),
    (re.compile(r"(x-amz-security-token['\"]?\s*[:=]\s*(?:b?['\"])?)[^\s'\",}<]+", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "***"),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), "***"),
)


class Redacted(RuntimeError):
    """Stands for an error whose text, or that of one behind it, held a secret."""


def redacted(text: str) -> str:
    """The text with `***` where secrets stood, and with `<NAME>` for values of the environment and of the credentials file."""
    for name, value in _secrets():
        for form in (value, quote(value, safe="")):
            text = text.replace(form, f"<{name}>")
    return masked(text)


def masked(text: str) -> str:
    """The text with `***` where it has the form of a secret, whatever the environment holds."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _secrets() -> list[tuple[str, str]]:
    """Name and value of what the environment and the credentials file keep secret, the longest first: one may be part of another."""
    named = [*os.environ.items(), *_in_file()]
    secret = ((name, value) for name, value in named if SECRET_NAMES.search(name) and not NOT_SECRET.search(name))
    return sorted((pair for pair in secret if len(pair[1]) >= SHORTEST), key=lambda pair: -len(pair[1]))


def _in_file() -> tuple[tuple[str, str], ...]:
    """Settings in the credentials file of S3, of all its profiles."""
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    try:
        return _settings(path, path.stat().st_mtime_ns)
    except OSError:
        return ()


@functools.lru_cache(1)
def _settings(path: Path, changed: int) -> tuple[tuple[str, str], ...]:
    """Read again when it has changed, not for every line of a log."""
    lines = (line.partition("=") for line in path.read_text(errors="replace").splitlines())
    return tuple((name.strip().upper(), value.strip()) for name, _, value in lines)


def without_secrets(error: Exception) -> Exception:
    """The error itself, when neither it nor an error behind it says anything secret; otherwise one that can be shown, an OSError for an
    OSError, since what is worth another try is told by that."""
    told = "".join(traceback.format_exception(error))
    if redacted(told) == told:
        return error
    text = f"{type(error).__name__}: {redacted(str(error))}"
    return OSError(text) if isinstance(error, OSError) else Redacted(text)
