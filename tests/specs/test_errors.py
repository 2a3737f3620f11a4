"""What errors of a spec say: suggestions, and no secret."""

from __future__ import annotations

import traceback

import pytest

from infra.store import StoreError
from infra.store.storage.retry import StorageError
from specs.errors import Problem, StageError, counted, did_you_mean, some_of


def test_suggestions_name_each_candidate_once() -> None:
    assert did_you_mean("x", ["main", "corpus", "main"]) == "use one of corpus, main."


def test_one_of_a_thing_is_named_in_the_singular() -> None:
    assert [counted(number, "document") for number in (0, 1, 1204)] == [
        "0 documents",
        "1 document",
        "1,204 documents",
    ]
    assert [counted(number, "unit is", "units are") for number in (1, 2)] == ["1 unit is", "2 units are"]


def test_of_many_names_the_first_stand_in_a_sentence() -> None:
    assert some_of("abcdef") == "a, b, c, d, e, f"
    assert some_of("abcdefgh") == "a, b, c, d, e, f and 2 more"
    assert some_of([*"abcd"], 2, "; ") == "a; b; and 2 more"


def test_a_problem_has_one_fix_which_is_that_of_the_error_that_it_repeats() -> None:
    assert str(Problem(("url",), "no file.", "correct it.")) == "url: no file. Fix: correct it."
    repeated = "a.txt is no text. Fix: leave it out"
    assert str(Problem(("url",), repeated, "correct it.")) == f"url: {repeated}"


@pytest.mark.parametrize("kind", [StageError, StoreError, StorageError])
def test_our_errors_mask_secrets_in_messages_that_they_repeat(kind: type[Exception]) -> None:
    error = kind("the storage failed: cannot open s3://me:hunter/2@bucket")
    assert str(error) == "the storage failed: cannot open s3://***@bucket"
    assert "hunter" not in "".join(traceback.format_exception(error))
