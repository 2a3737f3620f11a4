"""The differences between two mappings, name by name: flattened specs (`specs.base.flatten`), the inputs of
parts, or other values.

Every comparison of two specs is made here. The caller only words the result: why a part reruns, or how two
recipes or artifacts differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Change(Generic[T]):
    """A name whose values differ."""

    name: str
    a: T | None  # None where A lacks the name, or has None there; `only_in` tells which
    b: T | None
    only_in: Literal["a", "b"] | None = None  # the side that has the name, if the other lacks it

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "a": self.a, "b": self.b}


def changes(a: Mapping[str, T], b: Mapping[str, T]) -> list[Change[T]]:
    """The differences in the order of A, then the names that only B has. A value of None equals a missing
    name."""
    return [
        Change(name, a.get(name), b.get(name), "b" if name not in a else "a" if name not in b else None)
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    ]
