"""What the units of a corpus share: the spec, the plans, the tokenizer, and the results of earlier units,
such as the output of the filter tasks of a span with the later verdicts.

Invariants:
- A plan, which is the result of earlier units, is read when it is first asked for.
- Files of the store are read from their beginning to their end, a few thousand documents at a time.
- `gone` is the first step over the whole source that drops a document; later steps do not see it.
- Memory: the verdicts on a span (16 bytes for each dropped document), and a few thousand documents.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from apertus_model.data.corpora.exchange import CellWriter, read_cells
from apertus_model.data.corpora.plan import NUMBERED, CorpusLayout, CorpusPlan, Key, run_bytes
from apertus_model.data.corpora.planted import PlantedSets, from_json
from apertus_model.data.corpora.records import column, near_steps, read_records, signature_column
from apertus_model.data.corpora.selection import global_steps, not_in
from apertus_model.data.corpora.shuffle import DOCUMENTS, REJECTED
from apertus_model.data.corpora.verdicts import VERDICTS
from apertus_model.data.tokens.megatron import HEADER_BYTES, TokenFileError, read_header, token_dtype
from infra.store import Artifact, Attempt, StoreError
from infra.store.documents import Unit
from infra.store.files.reader import CheckedFile
from specs.stages.corpus import CorpusPart


class TaskTokens:
    """The tokens of a task, in order."""

    def __init__(self, data: CheckedFile, index: CheckedFile) -> None:
        self._name = data.name
        self._data: BinaryIO = data.stream()
        self._index: BinaryIO = index.stream()
        header = read_header(self._index.read(HEADER_BYTES), index.name)
        self.dtype = header.dtype
        self.left = header.sequences

    def sizes(self, count: int) -> NDArray[np.int64]:
        """The sizes of the next `count` documents, in tokens."""
        self.left -= count
        sizes = np.frombuffer(self._index.read(4 * count), "<i4").astype(np.int64)
        if self.left < 0 or len(sizes) < count:
            raise TokenFileError(f"{self._name} has fewer documents than the task's table says")
        return sizes

    def read(self, tokens: int) -> NDArray[np.integer]:
        data = self._data.read(tokens * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype)


class SpanBatch(NamedTuple):
    """Consecutive documents of a task."""

    records: pa.RecordBatch
    place: int  # of the first document, among the documents of the span
    step: NDArray[np.int16]  # the step that dropped it in its task, or the number of steps
    gone: NDArray[np.int16]  # the step over the whole source that dropped it, or -1
    value: NDArray[np.uint64]  # the value of that step's verdict
    copy: NDArray[np.uint32]  # its number among equal texts
    sizes: NDArray[np.int64]  # in tokens; -1 if the document was not tokenised
    tokens: TaskTokens  # the next ones to read are those of the batch


SpanVerdicts = tuple[NDArray[np.int64], NDArray[np.uint64]]
"""What a step over the whole source decided about documents of a span: places, ascending, and values, as in
`VERDICTS`; (documents,) each."""


def read_span(
    tasks: Iterable[Mapping[str, CheckedFile]],
    verdicts: Mapping[int, SpanVerdicts],
    steps: int,
    columns: list[str] | None,
) -> Iterator[SpanBatch]:
    """The documents of a span. `tasks`: the files of its tasks, in order; `verdicts`: by step, those of
    `NUMBERED` are the numbers of copies; `steps`: number of steps of the spec; `columns`: None reads all."""
    place = 0
    for files in tasks:
        tokens = TaskTokens(files["tokens.bin"], files["tokens.idx"])
        for records in read_records(files["documents.parquet"].stream(), columns):
            yield _batch(records, place, tokens, verdicts, steps)
            place += records.num_rows
        if tokens.left:
            raise TokenFileError(f"{files['tokens.bin'].name} has more documents than the task's table")


def _batch(
    records: pa.RecordBatch, place: int, tokens: TaskTokens, verdicts: Mapping[int, SpanVerdicts], steps: int
) -> SpanBatch:
    rows = records.num_rows
    gone, value = np.full(rows, -1, np.int16), np.zeros(rows, np.uint64)
    copy = np.zeros(rows, np.uint32)
    for step, (places, values) in verdicts.items():
        own = slice(*np.searchsorted(places, [place, place + rows]))
        at = places[own] - place
        if step == NUMBERED:
            copy[at] = values[own]
        else:
            gone[at], value[at] = step, values[own]
    dropped_by = column(records, "step")
    tokenised = dropped_by == steps
    sizes = np.full(rows, -1, np.int64)
    sizes[tokenised] = tokens.sizes(int(tokenised.sum()))
    return SpanBatch(records, place, dropped_by, gone, value, copy, sizes, tokens)


def blocks(
    batch: SpanBatch, memory: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.integer]]]:
    """The tokenised documents of a batch, as many at a time as have their tokens in `memory` bytes, and at
    least one: their rows in the batch, their sizes, and their tokens back to back."""
    rows = np.flatnonzero(batch.sizes >= 0)
    sizes = batch.sizes[rows]
    ends = np.cumsum(sizes)
    start = 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        most = before + memory // batch.tokens.dtype.itemsize
        stop = max(start + 1, int(np.searchsorted(ends, most, side="right")))
        yield rows[start:stop], sizes[start:stop], batch.tokens.read(int(ends[stop - 1]) - before)
        start = stop


class CorpusState:
    """The state of one attempt at a corpus. `folder`: local scratch."""

    def __init__(self, attempt: Attempt) -> None:
        self.part = CorpusPart.model_validate(attempt.job.spec)
        self.attempt = attempt
        self.steps = self.part.process.filters
        self.folder = attempt.workdir / "units"
        self.folder.mkdir(exist_ok=True)

    @cached_property
    def plan(self) -> CorpusPlan:
        return CorpusPlan.model_validate(self.unit("plan").data)

    @cached_property
    def layout(self) -> CorpusLayout:
        return CorpusLayout.model_validate(self.unit("layout").data)

    @cached_property
    def planted(self) -> PlantedSets:
        """The planted documents, with their tokens."""
        return from_json(self.unit("planted").data) if self.part.process.planted else {}

    @cached_property
    def tokenizer(self) -> Artifact:
        return self.attempt.input_artifact("tokenizer")

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.tokenizer.manifest.facts["vocab_size"])

    @property
    def memory(self) -> int:
        return run_bytes(self.plan.memory)

    @cached_property
    def decided(self) -> list[int]:
        """The steps over the whole source, or, if there are none, the step that numbers copies."""
        return global_steps(self.steps) or [NUMBERED]

    def others(self, step: int) -> list[Artifact]:
        return not_in(self.attempt, self.steps).get(step, [])

    def schema(self, kind: str) -> pa.Schema:
        """The schema of the rows from which files of that kind are written."""
        if kind == "kept":
            steps = near_steps(self.steps)
            lists = [pa.field(signature_column(step), pa.list_(pa.uint64(), step.buckets)) for step in steps]
            return pa.schema([pa.field("hash", pa.uint64()), *lists])
        return REJECTED if kind == "rejects" else DOCUMENTS

    # The units of passes

    def of_spans(self, kind: str) -> list[Key]:
        """The keys of the units that cover a span each."""
        return [Key(kind, number) for number in range(len(self.plan.spans))]

    def unit(self, key: object) -> Unit:
        """A unit of an earlier pass. StoreError when it is gone."""
        if (unit := self.attempt.unit(str(key))) is None:
            raise StoreError(f"unit {key} of {self.attempt.job.path} is gone; run the stage again")
        return unit

    def files(self, keys: Iterable[object], name: str) -> Iterator[CheckedFile]:
        """The file `name` of each unit, one after the other, since a pass may have thousands of units."""
        for key in keys:
            record = self.unit(key).files[name]
            yield self.attempt.store.reader(record.path, record)

    def rows(
        self, keys: Iterable[object], name: str, schema: pa.Schema, cells: int, first: int, end: int
    ) -> pa.Table:
        """The rows that units have in the cells [first, end) of all `cells` of `name`."""
        return read_cells(self.files(keys, f"{name}-00000"), schema, cells, first, end)

    def writer(self, name: str, schema: pa.Schema, borders: Sequence[int]) -> CellWriter:
        return CellWriter(self.folder, name, schema, borders, self.memory)

    def span(
        self, number: int, columns: list[str] | None = None, before: int | None = None
    ) -> Iterator[SpanBatch]:
        """The documents of a span, with some columns of their records (by default, all), and the verdicts of
        the steps before `before` (by default, of all)."""
        verdicts: dict[int, SpanVerdicts] = {}
        for step in self.decided if before is None else self.decided[: self.decided.index(before)]:
            keys = [Key("resolve", place, step) for place in range(self.plan.ranges)]
            rows = self.rows(keys, "verdicts", VERDICTS, len(self.plan.spans), number, number + 1)
            places, values = column(rows, "place"), column(rows, "value")
            order = np.argsort(places)
            verdicts[step] = places[order], values[order]
        reader = self.attempt.store.reader
        tasks = (
            {name: reader(record.path, record) for name, record in self.unit(key).files.items()}
            for key in self.plan.spans[number]
        )
        return read_span(tasks, verdicts, len(self.steps), columns)
