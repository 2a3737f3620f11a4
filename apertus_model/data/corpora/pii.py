"""Finds personal data in text and replaces it by one fixed placeholder per kind.

Invariant: the result depends on the text alone. (datatrove's formatter cycles through several replacements,
so its output depends on the texts that it has seen before.) The expressions for e-mail and IP addresses are
datatrove's, as in Apertus, except that only Latin letters and digits count as part of a word: Chinese or Thai
text has no space before an address. Only public IPv4 addresses count. The placeholders are those of Apertus
(swiss-ai/pretrain-data, pii_formatter.py).
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from datatrove.pipeline.formatters.pii import PIIFormatter, public_ip_validator

from specs.personal_data import Pii

PLACEHOLDERS: dict[Pii, str] = {
    "email": "<email-pii>",
    "ip": "<ip-pii>",
    "iban": "<iban-pii>",
    "phone": "<phone-pii>",
}

# Lengths of IBANs in characters, each with its countries (ISO 13616, the IBAN Registry).
IBAN_LENGTHS = {
    15: "NO",
    16: "BE",
    18: "DK FI FK FO GL NL SD",
    19: "MK SI",
    20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ OM SO TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST",
    26: "IS TR",
    27: "BI DJ FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
    29: "BR EG PS QA UA",
    30: "JO KW MU YE",
    31: "MT SC",
    32: "LC",
    33: "RU",
}


def _iban_expression() -> re.Pattern[str]:
    """An expression for country code and check digits, then as many characters as the country's numbers have,
    with at most one space before each."""
    forms = [
        rf"(?:{'|'.join(codes.split())})\d\d(?:[ \u00a0]?[A-Z0-9]){{{length - 4}}}"
        for length, codes in IBAN_LENGTHS.items()
    ]
    return re.compile(rf"\b(?:{'|'.join(forms)})(?![A-Za-z0-9])", re.ASCII)


def is_iban(text: str) -> bool:
    """Whether the check digits are right: with the first four characters moved to the end and letters
    written as 10 to 35, the number is 1 modulo 97 (ISO 7064, MOD 97-10)."""
    plain = "".join(text.split())
    return int("".join(str(int(character, 36)) for character in plain[4:] + plain[:4])) % 97 == 1


class _Kind(NamedTuple):
    expression: re.Pattern[str]  # finds candidates
    valid: Callable[[str], bool] | None  # whether a candidate is replaced; None: always
    sign: str  # a character that every match contains; "" if there is no such character


_DATATROVE = PIIFormatter()
_KINDS: dict[Pii, _Kind] = {
    "email": _Kind(re.compile(_DATATROVE.emails_replacer.regex.pattern, re.ASCII), None, "@"),
    "ip": _Kind(_DATATROVE.ip_replacer.regex, public_ip_validator, "."),
    "iban": _Kind(_iban_expression(), is_iban, ""),
    # International form only (ITU-T E.164): a plus sign and 8 to 15 digits, with the usual signs between
    # them. National forms look like any other number.
    "phone": _Kind(
        re.compile(r"(?<![\w+)])\+[1-9](?:[ \u00a0.\-()/]{0,2}[0-9]){7,14}(?![0-9])", re.ASCII), None, "+"
    ),
}
_RUN = re.compile(r"\S+")


class Replacer:
    """A replacer of the given kinds of personal data, in the given order."""

    def __init__(self, kinds: Sequence[Pii]) -> None:
        self.kinds = tuple(kinds)

    def __call__(self, text: str) -> tuple[str, tuple[int, ...]]:
        """The text with placeholders, and the number of replacements of each kind."""
        counts = []
        for kind in self.kinds:
            count = 0
            if _KINDS[kind].sign in text:
                text, count = _replace(kind, text)
            counts.append(count)
        return text, tuple(counts)


def _replace(kind: Pii, text: str) -> tuple[str, int]:
    expression, valid, sign = _KINDS[kind]
    count = 0

    def put(match: re.Match[str]) -> str:
        nonlocal count
        if valid and not valid(match[0]):
            return match[0]
        count += 1
        return PLACEHOLDERS[kind]

    if kind == "email":
        # The expression takes time that grows with the square of the length of a run of characters without an
        # @, such as encoded data.
        text = _RUN.sub(lambda run: expression.sub(put, run[0]) if sign in run[0] else run[0], text)
    else:
        text = expression.sub(put, text)
    return text, count
