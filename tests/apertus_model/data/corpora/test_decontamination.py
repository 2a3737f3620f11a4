from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from apertus_model.data.corpora.decontamination import Contamination
from apertus_model.data.corpora.filters import make_check
from infra.store.inputs import SourceError
from specs.filters import DecontaminateFilter

QUESTION = (
    "a train leaves the old station at noon and arrives in the next town two hours later how fast is it"
)


def _spec(folder: Path, **fields: float) -> DecontaminateFilter:
    return DecontaminateFilter.model_validate(
        {"filter": "decontaminate", "against": [{"url": str(folder), "format": "text"}], **fields}
    )


def _longest(one: list[str], other: list[str]) -> tuple[int, int, int]:
    """Start in both and length of the longest common run, the first one of that length."""
    best = (0, 0, 0)
    for i in range(len(one)):
        for j in range(len(other)):
            size = 0
            while i + size < len(one) and j + size < len(other) and one[i + size] == other[j + size]:
                size += 1
            if size > best[2]:
                best = (i, j, size)
    return best


def _blocks(one: list[str], other: list[str]) -> list[int]:
    """Ratcliff and Obershelp: the longest common run, then the same to its left and to its right."""
    i, j, size = _longest(one, other)
    if not size:
        return []
    return [*_blocks(one[:i], other[:j]), size, *_blocks(one[i + size :], other[j + size :])]


def _covered(question: str, document: str, ngram: int, min_match: int) -> float:
    """The published rule, slowly: 0 without a common n-gram, else the words of the blocks over those of
    the question."""
    one, other = question.split(), document.split()
    grams = [{tuple(text[i : i + ngram]) for i in range(len(text) - ngram + 1)} for text in (one, other)]
    if not grams[0] & grams[1]:
        return 0.0
    return sum(size for size in _blocks(one, other) if size >= min_match) / len(one)


def test_the_share_is_that_of_the_published_rule() -> None:
    random = Random(3)
    vocabulary = [chr(97 + i) * 3 for i in range(8)]
    positive = 0
    for _ in range(150):
        question = random.choices(vocabulary, k=random.randint(9, 24))
        document = (
            random.choices(vocabulary, k=10)
            + question[: random.randint(0, len(question))]
            + random.choices(vocabulary, k=6)
        )
        document += question[random.randint(0, len(question)) :]
        expected = _covered(" ".join(question), " ".join(document), 5, 3)
        found = Contamination([" ".join(question)], 5, 3).worst(" ".join(document))
        assert (found[0] if found else 0.0) == pytest.approx(expected)
        positive += expected > 0
    assert positive > 50


def test_a_document_that_covers_more_than_half_of_a_question_is_dropped(tmp_path: Path) -> None:
    from datatrove.data import Document

    questions = tmp_path / "questions"
    questions.mkdir()
    (questions / "a.txt").write_text(QUESTION)
    (questions / "b.txt").write_text(
        "another question that has nothing to do with it at all but is long enough"
    )
    check = make_check(_spec(questions), tmp_path)
    split = QUESTION.split()
    assert len(split) == 21
    cases = {
        "before " + QUESTION.upper() + "? after": True,
        " ".join(split[:11]): True,
        " ".join(split[:10]): False,
        # a match of three words does not count
        " ".join(split[:8]) + " something else " + " ".join(split[15:18]): False,
        " ".join(split[:8]) + " something else " + " ".join(split[15:20]): True,
        " ".join(" x ".join(split).split()): False,
        "nothing of it": False,
    }
    for text, dropped in cases.items():
        assert (check(Document(text, "d")) is not None) is dropped, text
    drop = check(Document(QUESTION, "d"))
    assert (
        drop is not None
        and drop.value == f"1.000 of the question '{QUESTION}'"
        and drop.rule == "at most 0.5"
    )


def test_a_question_shorter_than_an_ngram_counts_as_a_whole() -> None:
    index = Contamination(["Who wrote Faust?", "What is the capital of the Swiss Confederation?"], 8, 5)
    found = index.worst("A quiz: who wrote Faust? Goethe.")
    assert found == (1.0, "Who wrote Faust?")
    assert index.worst("who wrote this about Faust") is None
    assert index.worst("what is the capital of the swiss confederation") is not None


def test_questions_are_distinguished_by_their_numbers() -> None:
    index = Contamination(["how much is 17 plus 25 when you add them up by hand"], 8, 5)
    assert index.worst("how much is 17 plus 25 when you add them") is not None
    assert index.worst("how much is 31 plus 99 when you add them") is None


def test_evaluation_sets_without_questions_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(SourceError, match="there is no question in"):
        make_check(_spec(tmp_path), tmp_path)
