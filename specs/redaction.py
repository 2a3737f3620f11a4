"""Redaction of secrets: messages of other libraries pass through here before they reach a log, a terminal, an
error or Prefect, and a URL with credentials is refused before it is used.

Invariant: redacted text has no value of an environment variable that is named like a secret, no value of the
credentials file of S3, no password of a URL, no signature of a signed one, no value that is assigned to the
name of a secret, and no authorisation header, even if they are escaped for JSON, Python, HTML or a URL. Other
text stays readable.
"""

import functools
import html
import json
import logging
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

SHORTEST = 6
"""Shortest environment value, in characters, that counts as a secret. Shorter ones, such as `test` or `1`,
appear in too many texts."""

# Names of secrets

_NAME = r"secret|passw(?:or)?d|passphrase|credentials?|(?:auth|connection)[_-]?string"
_NAME += r"|shared[_-]?access[_-]?signature"
_NAME += r"|(?:access|account|api|auth|encryption|master|private|shared|signing)[_-]?keys?"
_NAME += r"|(?:access|api|auth|bearer|bot|csrf|gitlab|hf|hub|(?<![a-z])id|oauth|personal|private|refresh"
_NAME += r"|security|session|subject|vault)[_-]?tokens?"
_PARAMETER_NAME = rf"[\w.-]*(?:{_NAME})|auth|jwt|key|pass|pat|pwd?|sas|sig|signature|token"
_PARAMETER_NAME += r"|X-(?:Amz|Goog)-(?:Credential|Signature)|AWSAccessKeyId|GoogleAccessId"
_CONSTANT_NAME = r"(?<=[A-Z0-9]_)(?:AUTH|KEY|PASS|PAT|PWD?|TOKEN)"
_VARIABLE = rf"{_NAME}|TOKEN(?!IZ|S(?:_|$))|(?:^|_)(?:(?:SSH)?PASS|PWD?|PAT|CREDS?)(?:_|$)"
_VARIABLE += r"|(?:^|_)(?:KEY|AUTH)(?:_?\d+)?$"
_NOT_SECRET = r"_(?:FILE|PATH|DIR|SOCK)$|^(?:OLD)?PWD$|^GOOGLE_APPLICATION_CREDENTIALS$"

# Values of secrets, and where they end

_LAST_QUOTE = r"\\*[\"'][)\]},;:.>]*(?:\s|$)"
_NEXT_PARAMETER = r"[&;](?:amp;)?[\w.%-]+=|\#[\w.%-]+="
_QUOTE = r"(?:b?(?P<quote>\\*[\"']))?+"
_QUOTED = r".*?(?=(?<!\\)(?P=quote)|$)"
_WORD = rf"(?!\s)(?:(?!{_LAST_QUOTE})(?![&;,](?:amp;)?\s?[\w.%-]+=)\S)+"
_LINE = rf"(?!\s)(?:(?!{_LAST_QUOTE}).)+"
_NOTHING = r"(?i:none|null|true|false)\b(?![\w-])"

# Names with values: the last group of a pattern is the secret, the group `shown` is the text before it

_PARAMETER = re.compile(
    rf"(?P<shown>[?&\#;](?:{_PARAMETER_NAME})=)(?P<secret>\S(?:(?!{_LAST_QUOTE}|{_NEXT_PARAMETER})\S)*)",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(?P<shown>\b(?:(?:proxy-)?authorization|(?:set-)?cookie)\\*[\"']?[ \t]*(?:=>|[:=]|(?<=[\"']),)[ \t]*"
    rf"{_QUOTE}(?:(?:ApiKey|AWS|AWS4-HMAC-SHA256|Basic|Bearer|Digest|Negotiate|SharedKey|Token)\b[ \t]*)?)"
    rf"(?P<secret>(?(quote){_QUOTED}|{_LINE}))",
    re.IGNORECASE | re.MULTILINE,
)
_ASSIGNMENT = re.compile(
    rf"(?P<shown>(?<!/etc/)(?:(?i:{_NAME})|{_CONSTANT_NAME})\\*[\"']?[ \t]*(?:=>|==?|:)[ \t]*{_QUOTE})"
    rf"(?!{_NOTHING})(?P<secret>(?(quote){_QUOTED}|{_WORD}))",
    re.MULTILINE,
)
_SIGNED = re.compile(r"(?P<shown>)(?P<secret>\bCredential=\S+?,\s*SignedHeaders=\S+?,\s*Signature=\w+)")
_PREFIXED = r"(?:AKIA|ASIA)[0-9A-Z]{16}\b|(?:hf|gh[opsu])_[A-Za-z0-9]{20,}"
_PREFIXED += r"|github_pat_\w{20,}|glpat-[\w-]{20,}"
_ISSUED = re.compile(rf"(?P<shown>\b)(?P<secret>{_PREFIXED})")
_PATTERNS = (_HEADER, _PARAMETER, _ASSIGNMENT, _SIGNED, _ISSUED)

# URLs

USERINFO = r"(?!\\*/)(?:[^/?#]*|[^:]*:.*)@"
"""Matches the user and the password after the `://` of a URL. A password may contain any character, so an `@`
in the authority ends one, and any `@` after a `:` may end one. An empty authority (`file:///`) has none."""
_URL = re.compile(r"(?P<scheme>:(?:(?:\\*/){2}|\\*/(?=[^\s/?#:@]+:\S*@)))(?P<rest>\S+)")
"""Also matches a single slash, as `Path` writes it, if a password follows."""


class Redacted(RuntimeError):
    """The replacement of an error whose text, or the text of its cause, holds a secret."""


class MaskedError(Exception):
    """An error that may repeat a library's message. Secrets in it are masked wherever it is shown."""

    def __str__(self) -> str:
        return redacted(super().__str__())


class RedactedRecord(logging.LogRecord):
    """A log record without secrets, for `logging.setLogRecordFactory`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.exc_info and self.exc_info[0] is not None:
            self.exc_text = redacted("".join(traceback.format_exception(*self.exc_info)).rstrip("\n"))

    def getMessage(self) -> str:
        return redacted(super().getMessage())


def credentials(rest: str) -> list[tuple[int, int]]:
    """Spans (begin, end) of the credentials in the part of a URL after `://`, in order and disjoint. All
    checks and masks of URLs use this."""
    spans = [(0, rest.rindex("@"))] if re.match(USERINFO, rest, re.DOTALL) else []
    for match in _PARAMETER.finditer(rest):
        begin, end = match.span("secret")
        if spans and begin < spans[-1][1]:
            begin, before = spans.pop()
            end = max(end, before)
        spans.append((begin, end))
    return spans


def without_credentials(url: str) -> str:
    """The URL. Raises ValueError, which does not repeat it, if it carries a user, password or signature."""
    _, scheme, rest = url.partition("://")
    if scheme and credentials("".join(rest.split())):
        raise ValueError(
            "a URL with credentials in it; leave them out, the storage client reads them from the environment"
            " (an '@' after a ':' counts as the end of a password, and 'key=' as a secret: where there is "
            "none, write %40 for the '@', or name a copy elsewhere)"
        )
    return url


def mask_url(text: str) -> str:
    """A value that is or contains a URL, in a form that a message may repeat: if it has credentials, without
    the text after the scheme. White space ends a URL in `redacted`; here a password may contain it."""
    try:
        return without_credentials(text)
    except ValueError:
        return text.partition("://")[0] + "://***"


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    return bool(re.search(_VARIABLE, name, re.IGNORECASE)) and not re.search(_NOT_SECRET, name, re.IGNORECASE)


def redacted(text: str) -> str:
    """The text with `***` in place of secrets, and `<NAME>` in place of values of the environment and of the
    credentials file."""
    names, spellings = _spellings((*os.environ.items(), *_in_file()))
    if names:
        text = spellings.sub(lambda match: f"<{names[(match.lastindex or 0) - 1]}>", text)
    return masked(text)


def masked(text: str) -> str:
    """The text with `***` where it has the form of a secret, regardless of the environment."""
    text = _URL.sub(_masked_url, text)
    for pattern in _PATTERNS:
        text = pattern.sub(r"\g<shown>***", text)
    return text


def _masked_url(match: re.Match[str]) -> str:
    rest = match["rest"]
    for begin, end in reversed(credentials(rest)):
        rest = f"{rest[:begin]}***{rest[end:]}"
    return match["scheme"] + rest


@functools.lru_cache(1)
def _spellings(variables: tuple[tuple[str, str], ...]) -> tuple[list[str], re.Pattern[str]]:
    """Names of the secrets among the variables, and a pattern with a group for each secret. The longest comes
    first, since one may be part of another."""
    secrets = {secret: name for name, value in variables for secret in _secrets_of(name, value)}
    ordered = sorted((secret for secret in secrets if len(secret) >= SHORTEST), key=len, reverse=True)
    pattern = "|".join(f"({_spelled(secret)})" for secret in ordered)
    return [secrets[secret] for secret in ordered], re.compile(pattern)


def _secrets_of(name: str, value: str) -> Iterator[str]:
    """The value of a variable that is named like a secret, as a whole and, since logs come in lines, line by
    line; and the secrets inside any value: the password of a URL, a field of a connection string or of JSON
    (`FSSPEC_S3`)."""
    if is_secret(name):
        yield value
        yield from map(str.strip, value.splitlines())
    for url in _URL.finditer(value):
        for begin, end in credentials(url["rest"]):
            secret = url["rest"][begin:end]
            yield secret if begin else secret.partition(":")[2]
    for assigned in _ASSIGNMENT.finditer(value):
        yield assigned["secret"]


def _spelled(secret: str) -> str:
    """A pattern that matches a secret as it is, and as JSON, Python, HTML and URLs escape it, even nested."""
    return "".join(map(_spelled_character, re.sub(r"\\+", r"\\", secret)))


def _spelled_character(character: str) -> str:
    if character.isascii() and (character.isalnum() or character == "_"):
        return character
    if character == "\\":
        return r"(?:\\++|%5C)"
    data = character.encode(errors="surrogateescape")
    forms = {character, json.dumps(character)[1:-1], repr(character)[1:-1], repr(data)[2:-1]}
    forms |= {
        quote(data, safe=""),
        html.escape(character),
        f"&#{ord(character)};",
        f"\\u{ord(character):04x}",
    }
    forms |= {"+"} if character == " " else set()
    pieces = ([re.escape(piece) for piece in form.split("\\") if piece] for form in sorted(forms))
    return "(?i:" + "|".join(r"\\*+" + r"\\*+".join(some) for some in pieces) + ")"


def _in_file() -> tuple[tuple[str, str], ...]:
    """The settings of all profiles in the credentials file of S3."""
    path = Path(os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"))
    try:
        return _settings(path, path.stat().st_mtime_ns)
    except OSError:
        return ()


@functools.lru_cache(1)
def _settings(path: Path, changed: int) -> tuple[tuple[str, str], ...]:
    """The settings of a file, cached by the time of its last change."""
    lines = (line.partition("=") for line in path.read_text(errors="replace").splitlines())
    return tuple((name.strip().upper(), value.strip()) for name, _, value in lines)


def without_secrets(error: Exception) -> Exception:
    """The error itself when neither it nor its causes hold a secret; otherwise an error that can be shown. An
    OSError stays an OSError, since that decides whether to retry."""
    text = "".join(traceback.format_exception(error))
    if redacted(text) == text:
        return error
    text = f"{type(error).__name__}: {redacted(str(error))}"
    return OSError(text) if isinstance(error, OSError) else Redacted(text)
