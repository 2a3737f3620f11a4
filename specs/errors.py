"""Errors about specs.

Invariant: a user's mistake becomes a `SpecError` with every problem found, each with file and line, field,
value and fix. `specs` raises nothing else for a bad file: never a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from specs.redaction import MaskedError, redacted

FieldPath = tuple[str | int, ...]
LISTED = 40
"""The number of candidates that are listed when none resembles the name."""


def dotted(path: FieldPath) -> str:
    """`("stages", "sft", "betas", 0)` -> `stages.sft.betas[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


@dataclass(frozen=True)
class Problem:
    """One mistake. As text it holds no secret."""

    path: FieldPath
    message: str  # what is wrong with the value at `path`
    fix: str = ""  # what to do about it
    where: str = ""  # "mini.yaml:12", or "--set" for a value that came from the command line

    def __str__(self) -> str:
        text = f"{self.where}: " if self.where else ""
        if self.path:
            text += f"{dotted(self.path)}: "
        text += self.message
        has_fix = ". Fix: " in self.message  # of the error of a file, which knows more
        return redacted(f"{text.rstrip('.')}. Fix: {self.fix}" if self.fix and not has_fix else text)


class SpecError(ValueError):
    """An error with the mistakes of a spec in `problems`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def of(cls, path: FieldPath, message: str, fix: str = "", where: str = "") -> SpecError:
        return cls([Problem(path, message, fix, where)])


class StageError(MaskedError, ValueError):
    """The error of a stage that cannot succeed: another attempt would fail the same way, so none is made. The
    message says why."""


def a(noun: str) -> str:
    """The noun with its article: `an export`, `a corpus`."""
    return f"{'an' if noun[:1] in 'aeiou' or noun == 'sft' else 'a'} {noun}"


def counted(number: int, noun: str, several: str = "") -> str:
    """A number with its noun: `1 document`, `1,204 documents`. `several`: the plural, if it is not `noun`
    with an s."""
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Counts by name, in the order of the names: `2 empty, 1 not_utf8`, or `none`."""
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"


def some_of(names: Iterable[str], most: int = 6, between: str = ", ") -> str:
    """The first `most` names, and how many more there are: `a, b and 5 more`, or `a; b; and 5 more`."""
    listed = list(names)
    more = f"{between.strip(', ')} and {len(listed) - most:,} more" if len(listed) > most else ""
    return between.join(listed[:most]) + more


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that resembles the name most; None if none does."""
    return next(iter(difflib.get_close_matches(name, sorted(set(candidates)), n=1, cutoff=0.55)), None)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`did you mean 'lr'?`, or the first `LISTED` candidates."""
    names = set(candidates)
    close = nearest(name, names)
    return one_of(names) if close is None else f"did you mean '{close}'?"


def one_of(candidates: Iterable[str]) -> str:
    """The first `LISTED` candidates: `use one of corpus, main.`"""
    names = sorted(set(candidates))
    if not names:
        return "there is none to choose from."
    return f"use one of {some_of(names, LISTED)}."
