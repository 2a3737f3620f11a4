"""What the units of a corpus share: the spec, the plans, the tokenizer, and the results of earlier units.

Invariant: a plan, which is the result of earlier units, is read when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from apertus_model.data.corpora.exchange import CellWriter, read_cells
from apertus_model.data.corpora.keys import NUMBERED, Key, StepKey
from apertus_model.data.corpora.plan import CorpusPlan, Layout, run_bytes
from apertus_model.data.corpora.planted import PlantedSets, from_json
from apertus_model.data.corpora.records import column, near_steps, signature_column
from apertus_model.data.corpora.selection import global_steps, not_in
from apertus_model.data.corpora.shuffle import DOCUMENTS, REJECTED
from apertus_model.data.corpora.span import Batch, SpanVerdicts, read_span
from apertus_model.data.corpora.verdicts import VERDICTS
from apertus_model.data.tokens.megatron import token_dtype
from infra.store import Artifact, Attempt, StoreError
from infra.store.documents import Unit
from infra.store.files.reader import CheckedFile
from specs.job import Job
from specs.stages.corpus import CorpusPart


class CorpusState:
    """The state of one attempt at a corpus. `folder`: local scratch."""

    def __init__(self, job: Job, attempt: Attempt) -> None:
        self.part = CorpusPart.model_validate(job.spec)
        self.attempt = attempt
        self.steps = self.part.process.filters
        self.folder = attempt.workdir / "units"
        self.folder.mkdir(exist_ok=True)

    @cached_property
    def plan(self) -> CorpusPlan:
        return CorpusPlan.model_validate(self.unit("plan").data)

    @cached_property
    def layout(self) -> Layout:
        return Layout.model_validate(self.unit("layout").data)

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
        """The corpora that a step compares with."""
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

    def of_ranges(self, kind: str) -> list[Key]:
        """The keys of the units that cover a range of texts each."""
        return [Key(kind, number) for number in range(self.plan.ranges)]

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
        """A writer of the rows of a unit."""
        return CellWriter(self.folder, name, schema, borders, self.memory)

    def span(
        self, number: int, columns: list[str] | None = None, before: int | None = None
    ) -> Iterator[Batch]:
        """The documents of a span, with some columns of their records (by default, all), and the verdicts of
        the steps before `before` (by default, of all)."""
        verdicts: dict[int, SpanVerdicts] = {}
        for step in self.decided if before is None else self.decided[: self.decided.index(before)]:
            keys = [StepKey("resolve", step, place) for place in range(self.plan.ranges)]
            rows = self.rows(keys, "verdicts", VERDICTS, len(self.plan.spans), number, number + 1)
            places, values = column(rows, "place"), column(rows, "value")
            order = np.argsort(places)
            verdicts[step] = SpanVerdicts(places[order], values[order])
        reader = self.attempt.store.reader
        tasks = (
            {name: reader(record.path, record) for name, record in self.unit(key).files.items()}
            for key in self.plan.spans[number]
        )
        return read_span(tasks, verdicts, len(self.steps), columns)
