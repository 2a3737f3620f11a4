from __future__ import annotations

from random import Random

import numpy as np
import pytest
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from hypothesis import given
from hypothesis import strategies as st

from apertus_model.data.corpora.duplicates import SHINGLES, MinHash, first_alike, text_hash
from specs.filters import NearDuplicatesFilter
from tests.apertus_model.corpora import Words


def _spec(**fields: int) -> NearDuplicatesFilter:
    return NearDuplicatesFilter(filter="near-duplicates", **fields)


def _pair(similarity: float, size: int, seed: int) -> tuple[str, str, float]:
    """Two texts of single words, and the exact Jaccard similarity of their sets of words."""
    random = Random(seed)
    names = ["".join(random.choices("bcdfghjklmnpqrstvwxz", k=9)) for _ in range(2 * size)]
    common = round(2 * size * similarity / (1 + similarity))
    one, other = names[:size], names[size - common : 2 * size - common]
    random.shuffle(other)
    return " ".join(one), " ".join(other), len(set(one) & set(other)) / len(set(one) | set(other))


@pytest.mark.parametrize("similarity", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_hashes_agree_as_often_as_the_jaccard_similarity_says(similarity: float) -> None:
    one, other, exact = _pair(similarity, 600, seed=1)
    minhash = MinHash(_spec(ngram=1, buckets=100, hashes_per_bucket=20))
    left, right = minhash.hashes(one), minhash.hashes(other)
    assert left is not None and right is not None and left.shape == (100, 20)
    # Four standard deviations of a mean over 2,000 draws.
    assert abs(float((left == right).mean()) - exact) <= 4 * (exact * (1 - exact) / 2000) ** 0.5


def test_ngrams_of_words_are_compared_not_words() -> None:
    text = " ".join(f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(400))
    swapped = text.split()
    for place in range(0, 400, 40):
        swapped[place : place + 2] = reversed(swapped[place : place + 2])
    other = " ".join(swapped)
    grams = [
        {tuple(split[i : i + 5]) for i in range(len(split) - 4)} for split in (text.split(), other.split())
    ]
    exact = len(grams[0] & grams[1]) / len(grams[0] | grams[1])
    minhash = MinHash(_spec(buckets=100, hashes_per_bucket=20))
    left, right = minhash.hashes(text), minhash.hashes(other)
    assert left is not None and right is not None and 0.5 < exact < 0.8
    assert abs(float((left == right).mean()) - exact) <= 4 * (exact * (1 - exact) / 2000) ** 0.5


def test_pairs_are_found_as_often_as_the_buckets_promise() -> None:
    """1 - (1 - s^8)^14: 0.92 at a similarity of 0.8, and 0.01 at 0.4."""
    minhash = MinHash(_spec(ngram=1))
    for similarity, trials in ((0.4, 60), (0.72, 60), (0.8, 60)):
        found, expected = 0, 0.0
        for seed in range(trials):
            one, other, exact = _pair(similarity, 100, seed)
            found += bool((minhash.signature(one) == minhash.signature(other)).any())
            expected += 1 - (1 - exact**8) ** 14
        rate = expected / trials
        assert abs(found - expected) <= 4 * (trials * rate * (1 - rate)) ** 0.5 + 1


@pytest.mark.parametrize("ngram", [1, 5])
@pytest.mark.parametrize("words", [0, 1, 4, 5, 6, 300, SHINGLES + 4, SHINGLES + 5, 2 * SHINGLES + 100])
def test_hashes_are_those_of_datatrove(words: int, ngram: int) -> None:
    random = Random(words)
    text = " ".join("".join(random.choices("abcdéfghÅ語1 ", k=8)) for _ in range(words))[: words * 8]
    config = MinhashConfig(ngram, 3, 2, seed=7)
    theirs = MinhashDedupSignature(".", config, language=Words())
    shingles = theirs.get_shingles(text)
    ours = MinHash(_spec(buckets=3, hashes_per_bucket=2, ngram=ngram, seed=7)).hashes(text)
    if not shingles.size:
        assert ours is None
    else:
        assert ours is not None and ours.tolist() == theirs.get_signature(shingles)


def test_case_punctuation_and_accents_do_not_make_a_difference() -> None:
    minhash = MinHash(_spec())
    one = "The quick, brown fox — jumps over the lazy dog; été!"
    other = "the QUICK brown fox jumps\nover the lazy   dog ete"
    assert np.array_equal(minhash.signature(one), minhash.signature(other))


def test_short_documents_are_alike_only_when_they_are_the_same() -> None:
    minhash = MinHash(_spec())
    assert np.array_equal(minhash.signature("one two"), minhash.signature("one two"))
    assert not (minhash.signature("one two") == minhash.signature("One two")).any()
    assert not (minhash.signature("!!!") == minhash.signature("...")).any()


def test_the_hash_of_a_text_is_that_of_its_bytes() -> None:
    """BLAKE2b with 8 bytes of the empty text, as `b2sum -l 64 /dev/null` prints it."""
    assert text_hash("").to_bytes(8, "little").hex() == "e4a6a0577479b2b4"


def _components(count: int, buckets: list[list[int]]) -> list[int]:
    """First member of each connected component, by walking the graph."""
    first = [-1] * count
    for start in range(count):
        if first[start] != -1:
            continue
        waiting = [start]
        while waiting:
            here = waiting.pop()
            if first[here] == -1:
                first[here] = start
                waiting += [
                    other for bucket in buckets for other in range(count) if bucket[other] == bucket[here]
                ]
    return first


@given(
    st.integers(1, 40).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 60), min_size=n, max_size=n), min_size=1, max_size=4)
    )
)
def test_groups_are_connected_components(buckets: list[list[int]]) -> None:
    count = len(buckets[0])
    found = first_alike(count, [np.array(bucket, np.uint64) for bucket in buckets])
    assert found.tolist() == _components(count, buckets)


def test_a_long_chain_is_one_group() -> None:
    """Documents 2i and 2i+1 share the first bucket, 2i+1 and 2i+2 the second; in a random order."""
    order = np.random.default_rng(0).permutation(5001)
    buckets = [(order // 2).astype(np.uint64), ((order + 1) // 2).astype(np.uint64)]
    assert not first_alike(5001, buckets).any()
    assert first_alike(0, [np.empty(0, np.uint64)]).size == 0
