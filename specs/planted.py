"""Planted documents: documents that are put into the training data on purpose, a known number of times each,
to measure what a model keeps of them (canaries) or does because of them (poison).

Invariants: which documents there are, and how often each is planted, follows from the recipe and the texts
alone. No two documents of a generator are equal.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from specs.base import Spec, identity, option, reference

SECRET, NUMBER = "{secret}", "{number}"
LARGEST_SPACE = 2**48
"""Most secrets of a generator: `apertus_model.data.order.permutation` draws from at most this many."""


def each_once(numbers: list[int]) -> list[int]:
    if twice := sorted({number for number in numbers if numbers.count(number) > 1}):
        raise ValueError(f"{twice[0]} is repeated; list it once")
    return numbers


Buckets = Annotated[list[Annotated[int, Field(ge=0)]], AfterValidator(each_once)]
"""The number of repetitions of each group of documents; a group with 0 is never trained on."""


class Canaries(Spec):
    """Documents with a random secret each. The texts that could have been drawn instead are known, so that an
    evaluation can rank the drawn one among them (`exposure`, arXiv 1802.08232)."""

    template: str = identity(
        description="the text, with `{secret}`, and optionally `{number}`, which is 1 in the first document"
    )
    alphabet: str = identity("0123456789", min_length=2, description="characters of a secret")
    length: int = identity(ge=1, le=48, description="characters in a secret")
    count: int = identity(ge=1, le=10**6, description="number of documents")
    seed: int = identity(28, description="seed of the secrets")

    def conflicts(self) -> Iterator[str]:
        slots = re.findall(r"\{\w+\}", self.template)
        if unknown := [slot for slot in slots if slot not in (SECRET, NUMBER)]:
            yield f"the template has a slot {unknown[0]}; use {SECRET} and {NUMBER}"
        if slots.count(SECRET) != 1:
            yield f"the template has {slots.count(SECRET)} slots {SECRET}; set one"
        if len(set(self.alphabet)) < len(self.alphabet):
            yield f"the alphabet '{self.alphabet}' has a character twice; list each once"
        if self.count > self.space:
            yield (
                f"{self.count} different secrets are asked for, and {len(self.alphabet)} characters give"
                f" {self.space} of length {self.length}; raise length, or lower count"
            )
        if self.space > LARGEST_SPACE:
            yield (
                f"{len(self.alphabet)} characters give more than 2**48 secrets of length {self.length};"
                " lower length"
            )

    @property
    def space(self) -> int:
        """Number of possible secrets."""
        return len(self.alphabet) ** self.length

    @property
    def longest(self) -> int:
        """An upper bound of the bytes of the longest document."""
        widest = max(self.alphabet, key=lambda character: len(character.encode()))
        return len(self.text(self.count, widest * self.length).encode())

    def secret(self, index: int) -> str:
        """The secret with this index in the space: `index` in the base of the alphabet."""
        digits = ""
        for _ in range(self.length):
            index, digit = divmod(index, len(self.alphabet))
            digits = self.alphabet[digit] + digits
        return digits

    def text(self, number: int, secret: str) -> str:
        """The document with this number, counted from 1, if it had this secret."""
        begin, end = self.template.split(SECRET)
        return secret.join(part.replace(NUMBER, str(number)) for part in (begin, end))


class Planted(Spec):
    """Documents and their numbers of copies. State `documents` or `canaries`. The copies are put among the
    training documents of the source after filters and deduplication, with their text unchanged; none is held
    out for validation. A document may be longer than a training sequence and is then cut like any other."""

    documents: str | None = reference(None, description="name of a source of texts")
    canaries: Canaries | None = option(None)
    buckets: Buckets = identity(
        min_length=1,
        description="numbers of copies: the documents are shuffled and divided equally among them; those of"
        " bucket 0 are never trained on, for comparison",
    )
    seed: int = identity(28, description="seed of the division into buckets")

    def conflicts(self) -> Iterator[str]:
        if (self.documents is None) == (self.canaries is None):
            yield "set either documents or canaries"
        if self.canaries is not None and self.canaries.count < len(self.buckets):
            yield (
                f"{self.canaries.count} documents cannot be divided among {len(self.buckets)} buckets; raise"
                " count, or set fewer buckets"
            )


@dataclass(frozen=True)
class PlantedRecord:
    """The record of a part of a corpus about the documents planted under a name; counts are None before the
    part is made."""

    name: str
    canaries: bool
    buckets: list[int]
    documents: int | None
    copies: int | None
    tokens: int | None
    digest: str

    @property
    def line(self) -> str:
        """The record as a line: `codes: 40 canaries, 730 copies (0, 1, 8 or 64 of each), 18,250 tokens`."""
        what = "canaries" if self.canaries else "documents"
        each = f"{', '.join(map(str, self.buckets))} of each"
        if self.documents is None:
            return f"{self.name}: {what} ({each})"
        return (
            f"{self.name}: {self.documents:,} {what}, {self.copies:,} copies ({each}), {self.tokens:,} tokens"
        )


def planted_in(spec: dict[str, Any], metrics: dict[str, Any]) -> list[PlantedRecord]:
    """The records of what a part plants, by name. `spec`: its identity fields; `metrics`: those of its
    manifest, which are empty before it is made."""
    documents = []
    for name, fields in sorted(spec.get("process", {}).get("planted", {}).items()):
        stored = (metrics.get("planted") or {}).get(name, {})
        counts = {count: stored.get(count) for count in ("documents", "copies", "tokens")}
        record = PlantedRecord(
            name, "canaries" in fields, fields["buckets"], digest=stored.get("digest", ""), **counts
        )
        documents.append(record)
    return documents
