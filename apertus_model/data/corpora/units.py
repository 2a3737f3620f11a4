"""The units of all passes of a corpus. The key of a unit says what it computes:

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

Invariants:
- A unit reads files of committed units of earlier passes, from the store, and nothing else.
- It is planned by `CorpusPlan` and `Layout`, which are units themselves (`plan`, `layout`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from apertus_model.data.corpora import components as graph
from apertus_model.data.corpora.components import EDGES, SIGNED, Edges
from apertus_model.data.corpora.exchange import CellWriter, cell_borders, cell_of, read_cell, read_cells
from apertus_model.data.corpora.plan import CorpusPlan, Layout, Output, run_bytes
from apertus_model.data.corpora.planted import PlantedSets, from_json
from apertus_model.data.corpora.records import column, near_steps, signature_column, signatures
from apertus_model.data.corpora.scatter import Scatter
from apertus_model.data.corpora.scored import stored_scores
from apertus_model.data.corpora.selection import global_steps
from apertus_model.data.corpora.shuffle import DOCUMENTS, REJECTED, write_kept, write_rejects, write_shard
from apertus_model.data.corpora.span import SpanReader, step_name, unit_files, unit_of
from apertus_model.data.corpora.tokenise import CorpusTasks
from apertus_model.data.corpora.verdicts import (
    MEMBERS,
    VERDICTS,
    drop_duplicates,
    number_copies,
    tally,
)
from apertus_model.data.documents.readers import files_of_tasks
from apertus_model.data.tokens.megatron import token_dtype
from apertus_model.work import Result
from infra.store import Artifact, Attempt
from specs.filters import NearDuplicatesFilter
from specs.job import Job
from specs.stages.corpus import CorpusPart

NUMBERED = SpanReader.NUMBERED
SHOWN = 3
OPENINGS = pa.schema(
    [
        pa.field("opening", pa.uint64()),
        pa.field("text", pa.uint64()),
        pa.field("candidate", pa.bool_()),
    ]
)


class CorpusWork:
    """All units of a corpus; `keys` are the keys of those to run now."""

    def __init__(self, job: Job, attempt: Attempt) -> None:
        self.part = CorpusPart.model_validate(job.spec)
        self.attempt = attempt
        self.steps = self.part.process.filters
        self.tasks = files_of_tasks(self.part, "documents")
        self.keys: Sequence[str] = list(self.tasks)
        self.folder = attempt.workdir / "units"
        self.folder.mkdir(exist_ok=True)

    @cached_property
    def plan(self) -> CorpusPlan:
        return CorpusPlan.model_validate(unit_of(self.attempt, "plan").data)

    @cached_property
    def layout(self) -> Layout:
        return Layout.model_validate(unit_of(self.attempt, "layout").data)

    @cached_property
    def planted(self) -> PlantedSets:
        """The planted documents, with their tokens."""
        return from_json(unit_of(self.attempt, "planted").data) if self.part.process.planted else {}

    @cached_property
    def tokenizer(self) -> Artifact:
        return self.attempt.input_artifact("tokenizer")

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.tokenizer.manifest.facts["vocab_size"])

    @cached_property
    def decided(self) -> list[int]:
        """The steps over the whole source, or, if there are none, the step that numbers copies."""
        return global_steps(self.steps) or [NUMBERED]

    def others(self, step: int) -> list[Artifact]:
        """The corpora that a step compares with."""
        roles = [f"not_in:{step}:{number}" for number in range(len(self.not_in(step)))]
        return [self.attempt.input_artifact(role) for role in roles]

    def not_in(self, step: int) -> list[Any]:
        return list(getattr(self.steps[step], "not_in", [])) if step != NUMBERED else []

    def other_files(self, step: int) -> list[tuple[Artifact, str]]:
        """The tables of kept documents of the corpora that a step compares with."""
        return [(other, name) for other in self.others(step) for name in other.manifest.facts["kept"]]

    @property
    def memory(self) -> int:
        return run_bytes(self.plan.memory)

    def run(self, key: str) -> Result:
        """Computes one unit in this process."""
        pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own allocators keep more memory per unit
        result = self._run(key)
        _return_freed_memory()
        return result

    def _run(self, key: str) -> Result:
        kind, *rest = key.split("-")
        if kind == "documents":
            return self._filter_task.run(key)
        if kind in ("openings", "scatter"):
            return getattr(self, f"_{kind}")(int(rest[0]))
        if kind == "probes":
            return self._probes(int(rest[0]))
        if kind in self.layout_kinds:
            return self._file(kind, int(rest[0]))
        step = NUMBERED if rest[0] == step_name(NUMBERED) else int(rest[0])
        result: Result = getattr(self, f"_{kind}")(step, *map(int, rest[1:]))
        return result

    layout_kinds = ("train", "validation", "kept", "rejects")

    @cached_property
    def _filter_task(self) -> CorpusTasks:
        facts = self.tokenizer.manifest.facts
        folder = self.attempt.workdir / "tasks"
        folder.mkdir(exist_ok=True)
        return CorpusTasks(
            self.part.source,
            self.part.process,
            self.tasks,
            self.tokenizer.local("tokenizer.json"),
            facts["bos_token"],
            facts["eos_token"],
            folder,
            stored_scores(self.attempt, self.steps),
        )

    def span(self, number: int, before: int | None = None) -> SpanReader:
        """The documents of a span, with the verdicts of the steps before `before` (by default, of all)."""
        decided = self.decided if before is None else self.decided[: self.decided.index(before)]
        plan = self.plan
        return SpanReader(
            self.attempt, plan.spans[number], number, len(plan.spans), decided, plan.ranges, len(self.steps)
        )

    def _writer(self, name: str, schema: pa.Schema, borders: Sequence[int]) -> CellWriter:
        return CellWriter(self.folder, name, schema, borders, self.memory)

    # Steps over the whole source

    def _signatures(self, step: int) -> tuple[str, int] | None:
        """The column and the number of ranges of the signatures of a step; None without signatures."""
        chosen = self.steps[step] if step != NUMBERED else None
        if not isinstance(chosen, NearDuplicatesFilter):
            return None
        return signature_column(chosen), self.plan.signature_ranges(chosen.buckets)

    def _records(self, step: int, number: int) -> Result:
        members = self._writer("members", MEMBERS, [0, self.plan.ranges])
        near = self._signatures(step)
        signed = self._writer("signatures", SIGNED, [0, near[1] if near else 0])
        columns = ["text", "columns", "row", "final", "step", *([near[0]] if near else [])]
        for batch in self.span(number, step).read(columns):
            here = (batch.gone < 0) & (batch.step > step)
            rows = batch.records.filter(pa.array(here))
            text = column(rows, "text")
            place = np.flatnonzero(here) + batch.place
            arrays = [column(rows, name) for name in ("text", "columns", "row", "final")]
            arrays += [np.full(len(text), number, np.int32), place, batch.sizes[here].astype(np.int32)]
            members.add(_table(MEMBERS, arrays), cell_of(text, self.plan.ranges))
            if near:
                add_signed(signed, text, signatures(rows, near[0]), near[1])
        return Result(members.close() | (signed.close() if near else {}))

    def _others(self, step: int, number: int) -> Result:
        other, name = self.other_files(step)[number]
        near = self._signatures(step)
        assert near is not None, "only steps with signatures have such units"
        signed = self._writer("signatures", SIGNED, [0, near[1]])
        table = pq.ParquetFile(other.open(f"{name}.parquet").stream())
        for group in range(table.num_row_groups):
            values = signatures(table.read_row_group(group, columns=[near[0]]), near[0])
            add_signed(signed, np.full(len(values), graph.OTHER_CORPORA), values, near[1])
        return Result(signed.close())

    def signed_keys(self, step: int) -> list[str]:
        """The keys of the units that hold the members and signatures of a step."""
        others = range(len(self.other_files(step)) if self._signatures(step) else 0)
        return [
            *(f"records-{step_name(step)}-{one:05d}" for one in range(len(self.plan.spans))),
            *(f"others-{step_name(step)}-{one:05d}" for one in others),
        ]

    def _groups(self, step: int, number: int) -> Result:
        near = self._signatures(step)
        assert near is not None, "only steps with signatures have such units"
        files = unit_files(self.attempt, self.signed_keys(step), "signatures-00000")
        rows = read_cell(files, SIGNED, near[1], number)
        return self._edges(graph.edges_of(*(column(rows, name) for name in SIGNED.names)))

    def _edges(self, found: Edges, *, both: bool = True, **data: int) -> Result:
        """Writes the edges, sorted into cells by the range of their node."""
        ways = graph.both_ways(found) if both else found
        writer = self._writer("edges", EDGES, [0, self.plan.ranges])
        writer.add(_table(EDGES, ways), cell_of(ways.node, self.plan.ranges))
        return Result(writer.close(), {"edges": len(found.node), **data})

    def _read_edges(self, keys: list[str], first: int, end: int) -> Edges:
        files = unit_files(self.attempt, keys, "edges-00000")
        table = read_cells(files, EDGES, self.plan.ranges, first, end)
        return Edges(*(column(table, name) for name in EDGES.names))

    def group_keys(self, step: int) -> list[str]:
        near = self._signatures(step)
        return [f"groups-{step_name(step)}-{one:05d}" for one in range(near[1] if near else 0)]

    def star_keys(self, kind: str, step: int, turn: int) -> list[str]:
        ranges = range(self.plan.ranges)
        return [f"{kind}-{step_name(step)}-{turn:03d}-{one:05d}" for one in ranges]

    def _components(self, step: int) -> Result:
        edges = self._read_edges(self.group_keys(step), 0, self.plan.ranges)
        return self._edges(graph.components(edges), both=False)

    def _large(self, step: int, turn: int, number: int) -> Result:
        before = self.star_keys("small", step, turn - 1) if turn else self.group_keys(step)
        edges = self._read_edges(before, number, number + 1)
        return self._edges(graph.large_star(edges), both=False, digest=graph.digest(edges))

    def _small(self, step: int, turn: int, number: int) -> Result:
        edges = self._read_edges(self.star_keys("large", step, turn), number, number + 1)
        return self._edges(graph.small_star(edges))

    def _resolve(self, step: int, number: int) -> Result:
        plan = self.plan
        keys = [f"records-{step_name(step)}-{one:05d}" for one in range(len(plan.spans))]
        members = read_cell(
            unit_files(self.attempt, keys, "members-00000"), MEMBERS, plan.ranges, number
        ).combine_chunks()
        if step == NUMBERED:
            found = number_copies(members)
        else:
            labels = Edges(np.empty(0, np.uint64), np.empty(0, np.uint64))
            others: list[NDArray[np.uint64]] = []
            if self._signatures(step):
                labelled = unit_of(self.attempt, f"labels-{step_name(step)}").data
                labels = graph.labels(self._read_edges(labelled, number, number + 1))
            else:
                others = [
                    kept_texts(other, *cell_borders(plan.ranges, number)) for other in self.others(step)
                ]
            found = drop_duplicates(members, labels, others)
        verdicts = self._writer("verdicts", VERDICTS, [0, len(plan.spans)])
        rows = members.take(pa.array(found.concerned))
        verdicts.add(
            _table(VERDICTS, [column(rows, "place"), found.values]), column(rows, "span").astype(np.int64)
        )
        left = tally(members, found.stay, self.part.process.holdout)
        return Result(verdicts.close(), {"left": left, "shown": _shown(step, rows, found.values)})

    # The files

    def _openings(self, number: int) -> Result:
        from apertus_model.data.corpora.probes import add_openings

        writer = self._writer("openings", OPENINGS, [0, self.plan.ranges])
        assert self.part.process.repeats is not None, "only a spec with probes has such units"
        for batch in self.span(number).read(["text", "final", "step"]):
            add_openings(writer, batch, self.part.process, self.plan.ranges, run_bytes(self.plan.memory))
        return Result(writer.close())

    def _probes(self, number: int) -> Result:
        from apertus_model.data.corpora.probes import choose

        keys = [f"openings-{one:05d}" for one in range(len(self.plan.spans))]
        files = unit_files(self.attempt, keys, "openings-00000")
        rows = read_cell(files, OPENINGS, self.plan.ranges, number)
        assert self.part.process.repeats is not None, "only a spec with probes has such units"
        count, chosen = choose(rows, self.part.process.repeats, self.part.seed)
        return Result({}, {"candidates": count, "chosen": chosen})

    def _scatter(self, number: int) -> Result:
        return Scatter(self).run(number)

    def _file(self, kind: str, number: int) -> Result:
        tables = self._cells(kind, self.layout.outputs[kind], number)
        name = f"{kind}-{number:05d}"
        if kind == "rejects":
            path = self.folder / f"{name}.parquet"
            write_rejects(tables, path)
            return Result({path.name: path})
        if kind == "kept":
            path = self.folder / f"{name}.parquet"
            write_kept(tables, path, self.schema(kind))
            return Result({path.name: path})
        files, documents, tokens = write_shard(tables, self.folder / name, self.dtype)
        return Result(files, {"documents": documents, "tokens": tokens})

    def _cells(self, kind: str, output: Output, number: int) -> Iterator[pa.Table]:
        """The rows of a file, one cell at a time."""
        group, within = divmod(number, output.files_per_group)
        cells = output.borders[group + 1] - output.borders[group]
        keys = [f"scatter-{one:05d}" for one in range(len(self.plan.spans))]
        files = list(unit_files(self.attempt, keys, f"{kind}-{group:05d}"))
        first = within * output.cells
        return (read_cell(files, self.schema(kind), cells, first + cell) for cell in range(output.cells))

    def schema(self, kind: str) -> pa.Schema:
        """The schema of the rows from which files of that kind are written."""
        if kind == "kept":
            steps = near_steps(self.steps)
            lists = [pa.field(signature_column(step), pa.list_(pa.uint64(), step.buckets)) for step in steps]
            return pa.schema([pa.field("hash", pa.uint64()), *lists])
        return REJECTED if kind == "rejects" else DOCUMENTS


def _return_freed_memory() -> None:
    """Returns to the system the freed memory that glibc keeps."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def add_signed(
    writer: CellWriter, nodes: NDArray[np.uint64], values: NDArray[np.uint64], ranges: int
) -> None:
    """Adds the signatures of documents, (documents, buckets)."""
    buckets = np.tile(np.arange(values.shape[1], dtype=np.uint16), len(values))
    flat = values.ravel()
    rows = _table(SIGNED, [buckets, flat, np.repeat(nodes, values.shape[1])])
    writer.add(rows, cell_of(flat, ranges))


def kept_texts(corpus: Artifact, first: int, end: int) -> NDArray[np.uint64]:
    """The text hashes in [first, end) of the documents of a corpus, sorted."""
    found = [np.empty(0, np.uint64)]
    for name in corpus.manifest.facts["kept"]:
        table = pq.ParquetFile(corpus.open(f"{name}.parquet").stream())
        for group in range(table.num_row_groups):
            seen = table.metadata.row_group(group).column(0).statistics
            if seen.max >= first and seen.min < end:
                hashes = table.read_row_group(group, columns=["hash"]).column("hash").to_numpy()
                found.append(hashes[(hashes >= np.uint64(first)) & (hashes <= np.uint64(end - 1))])
    return np.concatenate(found)


def _table(schema: pa.Schema, arrays: Sequence[NDArray[Any]]) -> pa.Table:
    return pa.table([pa.array(values) for values in arrays], schema=schema)


def _shown(step: int, rows: pa.Table, values: NDArray[np.uint64]) -> list[list[int]]:
    """The first duplicates whose tokens were written: each text and what it is a duplicate of."""
    if step == NUMBERED:
        return []
    written = column(rows, "tokens") >= 0
    texts = column(rows, "text")[written]
    _, places = np.unique(texts.byteswap(), return_index=True)
    return [[int(texts[i]), int(values[written][i])] for i in places[:SHOWN]]
