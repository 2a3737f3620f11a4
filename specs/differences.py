"""What differs between two sides, name by name: flattened specs (`specs.base.flatten`), what parts read, other values.

Who compares two specs asks here and only words the answer: why a part reruns, what two recipes or artifacts differ in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Change(Generic[T]):
    """A name whose values differ."""

    name: str
    a: T | None  # None where A has no such name, or has None there; `only_in` tells which
    b: T | None
    only_in: Literal["a", "b"] | None = None  # the side that has the name, where the other has not


@dataclass(frozen=True)
class ReadInput:
    """What a part reads in one of its roles. Two are equal when they enter the part's fingerprint alike, whatever they are called."""

    fingerprint: str
    step: int | None  # of a checkpoint; None for anything else
    name: str = field(compare=False)  # to show


def changes(a: Mapping[str, T], b: Mapping[str, T]) -> list[Change[T]]:
    """In the order of A, then what only B has. A value of None and a name that is missing are equal."""
    return [
        Change(name, a.get(name), b.get(name), "b" if name not in a else "a" if name not in b else None)
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    ]
