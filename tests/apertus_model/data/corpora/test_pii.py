from __future__ import annotations

import time
from unittest.mock import ANY

import pytest

from apertus_model.data.corpora.pii import IBAN_LENGTHS, Replacer, is_iban

# Examples of the IBAN Registry (SWIFT).
REGISTRY = """
AD12 0001 2030 2003 5910 0100
AE07 0331 2345 6789 0123 456
AL47 2121 1009 0000 0002 3569 8741
AT61 1904 3002 3457 3201
AZ21 NABZ 0000 0000 1370 1000 1944
BE68 5390 0754 7034
BH67 BMAG 0000 1299 1234 56
BR18 0036 0305 0000 1000 9795 493C 1
CH93 0076 2011 6238 5295 7
CR05 0152 0200 1026 2840 66
CY17 0020 0128 0000 0012 0052 7600
CZ65 0800 0000 1920 0014 5399
DE89 3704 0044 0532 0130 00
DK50 0040 0440 1162 43
EE38 2200 2210 2014 5685
ES91 2100 0418 4502 0005 1332
FI21 1234 5600 0007 85
FR14 2004 1010 0505 0001 3M02 606
GB29 NWBK 6016 1331 9268 19
GR16 0110 1250 0000 0001 2300 695
HU42 1177 3016 1111 1018 0000 0000
IE29 AIBK 9311 5212 3456 78
IL62 0108 0000 0009 9999 999
IS14 0159 2600 7654 5510 7303 39
IT60 X054 2811 1010 0000 0123 456
LI21 0881 0000 2324 013A A
LU28 0019 4006 4475 0000
MT84 MALT 0110 0001 2345 MTLC AST0 01S
NL91 ABNA 0417 1643 00
NO93 8601 1117 947
PL61 1090 1014 0000 0712 1981 2874
PT50 0002 0123 1234 5678 9015 4
QA58 DOHB 0000 1234 5678 90AB CDEF G
SE45 5000 0000 0583 9825 7466
SM86 U032 2509 8000 0000 0270 100
TR33 0006 1005 1978 6457 8413 26
""".strip().splitlines()


@pytest.mark.parametrize("iban", REGISTRY)
def test_the_examples_of_the_registry_are_found_with_and_without_spaces(iban: str) -> None:
    replace = Replacer(["iban"])
    lengths = {code: length for length, codes in IBAN_LENGTHS.items() for code in codes.split()}
    assert lengths[iban[:2]] == len(iban.replace(" ", ""))
    for written in (iban, iban.replace(" ", ""), iban.replace(" ", "\u00a0")):
        assert replace(f"Pay to {written} AND NOT LATER, {written}.") == (
            "Pay to <iban-pii> AND NOT LATER, <iban-pii>.",
            (2,),
        )


def test_wrong_check_digits_or_lengths_are_not_ibans() -> None:
    replace = Replacer(["iban"])
    assert is_iban("GB82 WEST 1234 5698 7654 32")
    for text in (
        *(
            "DE88 3704 0044 0532 0130 00",
            "DE89 3704 0044 0532 0130 0",
            "DE89 3704 0044 0532 0130 000",
            "XDE89370400440532013000",
        ),
        *("ZZ68 5390 0754 7034", "de89370400440532013000", "DE89  3704 0044 0532 0130 00"),
    ):
        assert replace(text) == (text, (0,))


def test_every_wrong_check_digit_is_detected() -> None:
    """ISO 7064 MOD 97-10 detects all single substitutions."""
    plain = "CH9300762011623852957"
    for place in range(2, len(plain)):
        for digit in set("0123456789") - {plain[place]}:
            assert not is_iban(plain[:place] + digit + plain[place + 1 :])


def test_telephone_numbers_are_replaced_in_international_form_only() -> None:
    replace = Replacer(["phone"])
    found = ["+41 44 632 11 11", "+41446321111", "+49 (0)30 2093-0", "+1-202-555-0143", "+1 (202) 555.0143"]
    for number in found:
        assert replace(f"call {number}, please") == ("call <phone-pii>, please", (1,))
    for text in (
        "044 632 11 11",
        "x+12345678",
        "1+23456789",
        "+1234567",
        "+41 44",
        "+0123456789",
        "(a)+12345678",
        "+1234567890123456",
    ):
        assert replace(text) == (text, (0,))


def test_each_kind_has_one_placeholder_and_a_count() -> None:
    text = "a.b@mail.example, c@d.org; 8.8.8.8, 10.0.0.1 and 1.1.1.1; BE68539007547034; +41446321111"
    expected = "<email-pii>, <email-pii>; <ip-pii>, 10.0.0.1 and <ip-pii>; <iban-pii>; <phone-pii>"
    assert Replacer(["email", "ip", "iban", "phone"])(text) == (expected, (2, 2, 1, 1))
    assert Replacer([])(text) == (text, ())
    replace = Replacer(["email", "ip"])
    assert [replace(text) for _ in range(5)] == [replace(text)] * 5


def test_encoded_data_does_not_take_quadratic_time() -> None:
    text = "someone@mail.example " + "QUJD/+" * 100_000
    begin = time.perf_counter()
    replaced, counts = Replacer(["email", "ip", "iban", "phone"])(text)
    assert time.perf_counter() - begin < 5
    assert counts == (1, 0, 0, 0) and replaced.startswith("<email-pii> QUJD")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("联系john@example.com吧", "联系<email-pii>吧"),
        ("メールはjohn.doe@example.co.jpまで", "メールは<email-pii>まで"),
        ("ติดต่อjane@example.orgได้", "ติดต่อ<email-pii>ได้"),
        ("账号DE89370400440532013000。", "账号<iban-pii>。"),
        ("电话+41446681800，", "电话<phone-pii>，"),
        ("地址8.8.8.8号", "地址<ip-pii>号"),
        ("пишите:ivan@example.ru", "пишите:<email-pii>"),
    ],
)
def test_personal_data_are_found_in_scripts_without_spaces(before: str, after: str) -> None:
    assert Replacer(["email", "ip", "iban", "phone"])(before) == (after, ANY)
