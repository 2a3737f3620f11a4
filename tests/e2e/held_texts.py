"""A source whose texts a test can hold: files beside them say what becomes of a unit that reads one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

from apertus_model.data.documents.parsed import Parsed
from specs.sources import SourceSpec

HOLD = "hold"
WRONG = ".wrong"  # after the name of a text


def lines(file: BinaryIO, source: SourceSpec, path: str) -> Parsed:
    """A document for each line, once there is no file `hold`; an error for a text with a file `.wrong`."""
    folder = Path(source.url)
    while (folder / HOLD).exists():
        time.sleep(0.05)
    if (folder / f"{path}{WRONG}").exists():
        raise ValueError("a wrong text")
    yield from file.read().decode().splitlines()


def write(folder: Path, texts: int) -> None:
    """Texts of forty lines each, of words that differ."""
    folder.mkdir()
    for number in range(texts):
        words = (
            f"text {number} line {line} says {line * number % 97} and {line**3 % 89}" for line in range(40)
        )
        (folder / f"{number:02d}.txt").write_text("\n".join(words))
