"""The `parallel_text` part: the same lines in several languages, from rows that name their language or from
one file for each language, checked and put into one order.

Artifact: `lines-*.jsonl`, a row for each line: `{"id", "texts": {language: text}}`. Facts: `languages`,
sorted; `with_words`, those whose words are separated by white space; and the facts that `Rows` reads.

Invariants: every language has every line; lines are in the order in which the sources first name them; a
line that is empty, has no id, or occurs twice in a language is an error that names its place. All lines are
held in memory.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from apertus_model.data.corpora.words import has_spaces
from apertus_model.data.documents.parsed import Rejection
from apertus_model.data.documents.readers import source_documents
from apertus_model.data.rows import write_rows
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.errors import did_you_mean
from specs.sources import SourceSpec
from specs.stages.evaluate_tokenizers import ENDS, ParallelTextPart

LANGUAGE = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
NO_LANGUAGES = {end.strip("/") for end in ENDS}
"""Endings of the names of interval metrics, which cannot be names of languages."""
NAMED = 3  # languages that an error names


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. SourceError for text that is not parallel."""
    part = ParallelTextPart.model_validate(attempt.job.spec)
    progress.update(0, 1, "texts")
    text = read_parallel(part)
    rows = write_rows(attempt, "lines", ({"id": id_, "texts": line} for id_, line in text.lines.items()))
    with_words = [
        language for language in text.languages if has_spaces(line[language] for line in text.lines.values())
    ]
    without = sorted(set(text.languages) - set(with_words))
    progress.log(
        f"{len(text.lines):,} lines in {len(text.languages)} languages: {', '.join(text.languages)}"
        + (f"; {text.left_out:,} incomplete lines are left out" if text.left_out else "")
        + (f"; without words between spaces: {', '.join(without)}" if without else "")
    )
    progress.update(1, 1, "texts")
    attempt.commit(
        metrics={
            "lines": len(text.lines),
            "languages": len(text.languages),
            "left_out": text.left_out,
            "bytes": {
                language: sum(len(line[language].encode()) for line in text.lines.values())
                for language in text.languages
            },
        },
        facts={"languages": text.languages, "with_words": with_words, **rows},
    )


class Line(NamedTuple):
    """One line in one language."""

    language: str
    id: str
    text: str
    place: str  # for error messages


@dataclass(frozen=True)
class ParallelText:
    """Lines by id, each in every language."""

    languages: list[str]  # sorted
    lines: dict[str, dict[str, str]]  # id -> language -> text
    left_out: int  # lines that some language lacks


def read_parallel(part: ParallelTextPart) -> ParallelText:
    """The lines of all sources. SourceError for text that is not parallel."""
    lines: dict[str, dict[str, str]] = {}
    for source in part.sources:
        for line in _lines(source, part.language_column):
            texts = lines.setdefault(line.id, {})
            if line.language in texts:
                raise SourceError(
                    f"{line.place}: language '{line.language}' has line '{line.id}' twice. Fix: give each"
                    " line an id of its own"
                )
            texts[line.language] = line.text
    languages = _chosen(part, sorted({language for texts in lines.values() for language in texts}))
    lines = {id_: texts for id_, texts in lines.items() if not texts.keys().isdisjoint(languages)}
    whole = {
        id_: {language: texts[language] for language in languages}
        for id_, texts in lines.items()
        if all(language in texts for language in languages)
    }
    count = len(lines)
    if len(whole) < count and part.incomplete == "refuse":
        fix = "add the lines, choose among them with languages:, or set incomplete: leave_out"
        raise SourceError(f"of {count:,} lines, {_lacking(lines, languages)}. Fix: {fix}")
    if len(whole) < max(2, part.lines or 0):
        wanted = f"lines: {part.lines:,} are asked for" if part.lines else "an interval needs two"
        fix = "add lines, set fewer, or choose among the languages with languages:"
        raise SourceError(
            f"{len(whole):,} of {count:,} lines are there in each of {len(languages)} languages, and"
            f" {wanted}: {_lacking(lines, languages) or 'none is incomplete'}. Fix: {fix}"
        )
    return ParallelText(languages, dict(list(whole.items())[: part.lines]), count - len(whole))


def _chosen(part: ParallelTextPart, present: list[str]) -> list[str]:
    """The languages that are compared. SourceError for one that no source has."""
    for language in part.languages:
        if language not in present:
            raise SourceError(
                f"languages: no line is in '{language}', and languages are named by"
                f" '{part.language_column}' of a source's metadata, else by its files. Fix:"
                f" {did_you_mean(language, present)}"
            )
    return part.languages or present


def _lacking(lines: dict[str, dict[str, str]], languages: list[str]) -> str:
    """The languages with the fewest lines, each with a line that it lacks."""
    lacked = {
        language: [id_ for id_, texts in lines.items() if language not in texts] for language in languages
    }
    worst = sorted((name for name in languages if lacked[name]), key=lambda name: -len(lacked[name]))
    shown = [
        f"'{name}' has {len(lines) - len(lacked[name]):,} (it lacks '{lacked[name][0]}')"
        for name in worst[:NAMED]
    ]
    more = f" and {len(worst) - NAMED} more languages lack some" if len(worst) > NAMED else ""
    return ", ".join(shown) + more


def _lines(source: SourceSpec, column: str) -> Iterator[Line]:
    for path, number, document in source_documents(source):
        own, row = PurePosixPath(path).name.split(".")[0], number + 1
        place = f"'{path}' of {source.url}, row {row}"
        if isinstance(document, Rejection):
            raise SourceError(
                f"{place}: it has no usable text ({document.problem or document.reason})."
                " Fix: remove the line"
            )
        if source.format == "text":
            yield from _file(document.text, own, f"'{path}' of {source.url}")
            continue
        if source.id_column is not None and document.id is None:
            raise SourceError(f"{place}: column '{source.id_column}' is empty. Fix: give each line an id")
        language = document.metadata.get(column, own)
        yield Line(_language(language, place), document.id or str(row), document.text, place)


def _file(text: str, language: str, file: str) -> Iterator[Line]:
    """The lines of a file that holds one language; their numbers are their ids."""
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        place = f"{file}, line {number}"
        if not line.strip():
            raise SourceError(
                f"{place}: it is empty. Fix: translate the line, or remove it from the files of all languages"
            )
        yield Line(_language(language, place), str(number), line.removesuffix("\r"), place)


def _language(value: object, place: str) -> str:
    """The value, if it can name a language in the names of metrics. SourceError otherwise."""
    if not isinstance(value, str) or not LANGUAGE.fullmatch(value) or value in NO_LANGUAGES:
        raise SourceError(
            f"{place}: {value!r} is not the name of a language. Fix: write a code such as deu_Latn"
        )
    return value
