"""The table of memorisation in the report: measures by decoding and prefix, over repetitions.

Invariant: metrics of an unexpected form are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

MEASURES = {
    "exact": "continued word for word",
    "rouge_l": "Rouge-L",
    "common_substring": "longest common run",
    "type_token_ratio": "type-token ratio",
    "sequences": "sequences",
}
DECODINGS = ("greedy", "nucleus", "truth")
Lines = dict[str, dict[int, float]]
Over = Literal["repetitions", "prefix", "offset"]
NAME = re.compile(
    rf"memorisation/(?P<decoding>{'|'.join(DECODINGS)})/prefix-(?P<prefix>\d+)/offset-(?P<offset>\d+)"
    rf"/(?P<measure>{'|'.join(MEASURES)})/(?P<repetitions>\d+)(?P<end>/low|/high)?",
    re.ASCII,
)


class Row(NamedTuple):
    """A measure, and how the continuations were made."""

    measure: str
    decoding: str
    prefix: int  # tokens given
    offset: int  # tokens of the sequence before the prefix


class Cell(NamedTuple):
    """The mean over the sequences that training repeated equally often, and its interval, if any."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Memorised:
    """The memorisation of one model: cells over repetitions, by row."""

    rows: dict[Row, dict[int, Cell]]

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Memorised:
        """Reads the metrics of an evaluation; there are no rows if it measured no memorisation."""
        cells_of: dict[Row, dict[int, Cell]] = {}
        for name, value in metrics.items():
            if (match := NAME.fullmatch(name)) and not match["end"]:
                row = Row(match["measure"], match["decoding"], int(match["prefix"]), int(match["offset"]))
                cell = Cell(value, metrics.get(f"{name}/low"), metrics.get(f"{name}/high"))
                cells_of.setdefault(row, {})[int(match["repetitions"])] = cell

        def place(row: Row) -> tuple[int, ...]:
            return [*MEASURES].index(row.measure), row.offset, row.prefix, DECODINGS.index(row.decoding)

        return cls({row: dict(sorted(cells_of[row].items())) for row in sorted(cells_of, key=place)})

    @property
    def repetitions(self) -> list[int]:
        return sorted({number for cells in self.rows.values() for number in cells})

    def lines(self, measure: str, over: Over) -> Lines:
        """A line of a measure for each decoding, over one of three numbers; the others are the most
        repetitions, the shortest prefix or the first offset. Empty over a prefix or an offset that all rows
        share."""
        prefixes, offsets = ({row[at] for row in self.rows} for at in (2, 3))
        lines: Lines = {}
        if not self.rows or (over != "repetitions" and len(prefixes if over == "prefix" else offsets) < 2):
            return lines
        for row, cells in self.rows.items():
            near = (over == "prefix" or row.prefix == min(prefixes)) and (
                over == "offset" or row.offset == min(offsets)
            )
            if row.measure != measure or not near:
                continue
            line = lines.setdefault(row.decoding, {})
            if over == "repetitions":
                line |= {number: cell.value for number, cell in cells.items()}
            elif (most := cells.get(self.repetitions[-1])) is not None:
                line[row.prefix if over == "prefix" else row.offset] = most.value
        return {decoding: dict(sorted(line.items())) for decoding, line in lines.items()}
