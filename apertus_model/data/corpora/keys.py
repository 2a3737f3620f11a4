"""The keys of the units of a corpus, which say what they compute:

    documents-...       a filter task: reads files, judges and tokenises their documents
    records-S-n         hashes of the documents of span n that reach step S, by ranges of hashes
    others-S-n          signatures of file n of the other corpora that step S compares with
    groups-S-n          joins texts that agree in a bucket: one range of values of signatures
    components-S        labels all texts of step S that are similar to a smaller one, in memory
    large-S-r-n, small-S-r-n    the same in rounds, over ranges of texts
    resolve-S-n         what becomes of the documents of a range of texts; S is `copies` where no step
                        removes duplicates, and copies are numbered
    openings-n, probes-n    beginnings of the documents of span n; those of a range that are unique
    scatter-n           the documents of span n on their way to the files of the corpus
    train-n, validation-n, kept-n, rejects-n    one file of the corpus

Invariant: keys are stored, so their text never changes; `parse(str(key)) == key`.
"""

from __future__ import annotations

from dataclasses import dataclass

NUMBERED = -1  # in place of a step: no step removes duplicates, and copies are numbered
SPLITS = ("train", "validation")
FILES = (*SPLITS, "kept", "rejects")


@dataclass(frozen=True)
class Key:
    """The key of a unit that covers span, range or file `number`."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.number:05d}"


@dataclass(frozen=True)
class StepKey:
    """The key of a unit of a step; `number` is None if the unit covers the whole step."""

    kind: str
    step: int
    number: int | None = None

    def __str__(self) -> str:
        name = f"{self.kind}-{step_name(self.step)}"
        return name if self.number is None else f"{name}-{self.number:05d}"


@dataclass(frozen=True)
class RoundKey:
    """The key of a unit of round `round` of a step."""

    kind: str
    step: int
    round: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind}-{step_name(self.step)}-{self.round:03d}-{self.number:05d}"


def parse(text: str) -> Key | StepKey | RoundKey:
    """The key that a text spells, of any unit but the filter tasks."""
    kind, *fields = text.split("-")
    if kind in (*FILES, "openings", "probes", "scatter"):
        return Key(kind, int(fields[0]))
    step, *numbers = fields
    index = NUMBERED if step == step_name(NUMBERED) else int(step)
    if len(numbers) == 2:
        return RoundKey(kind, index, int(numbers[0]), int(numbers[1]))
    return StepKey(kind, index, int(numbers[0]) if numbers else None)


def step_name(step: int) -> str:
    return "copies" if step == NUMBERED else f"{step:02d}"
