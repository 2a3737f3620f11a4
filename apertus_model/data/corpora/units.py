"""The units of all passes of a corpus (`keys` lists them).

Invariants:
- A unit reads files of committed units of earlier passes, from the store, and nothing else.
- It is planned by `CorpusPlan` and `Layout`, which are units themselves (`plan`, `layout`).
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from apertus_model.data.corpora import duplicates as graph
from apertus_model.data.corpora.duplicates import EDGES, SIGNED, Edges
from apertus_model.data.corpora.exchange import CellWriter, cell_borders, cell_of, read_cells
from apertus_model.data.corpora.plan import NUMBERED, SPLITS, Key, parse
from apertus_model.data.corpora.probes import OPENINGS, add_openings, choose
from apertus_model.data.corpora.records import REJECTS, column, read_records, signature_column, signatures
from apertus_model.data.corpora.scatter import Scatter
from apertus_model.data.corpora.shuffle import write_shard, write_table
from apertus_model.data.corpora.state import CorpusState
from apertus_model.data.corpora.tokenise import CorpusTasks
from apertus_model.data.corpora.verdicts import MEMBERS, VERDICTS, drop_duplicates, number_copies, tally
from apertus_model.data.documents.readers import files_of_tasks
from apertus_model.work import Result
from infra.store import Artifact, Attempt
from specs.filters import NearDuplicatesFilter

SHOWN = 3


class CorpusUnits(CorpusState):
    """The units of a corpus; `units` are the keys of those to run now."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self.tasks = files_of_tasks(self.part, "documents")
        self.units: Sequence[str] = list(self.tasks)

    def run(self, key: str) -> Result:
        """Computes one unit in this process."""
        pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own allocators keep more memory per unit
        result = self._filter_task.run(key) if key in self.tasks else self._run(parse(key))
        _return_freed_memory()
        return result

    def _run(self, key: Key) -> Result:
        match key:
            case Key("records", int(number), int(step)):
                return self._records(step, number)
            case Key("others", int(number), int(step)):
                return self._others(step, number)
            case Key("groups", int(number), int(step)):
                return self._groups(step, number)
            case Key("components", None, int(step)):
                edges = self._read_edges(self.group_keys(step), 0, self.plan.ranges)
                return self._edges(graph.components(edges), both=False)
            case Key("large", int(number), int(step), int(turn)):
                before = self.star_keys("small", step, turn - 1) if turn else self.group_keys(step)
                edges = self._read_edges(before, number, number + 1)
                return self._edges(graph.large_star(edges), both=False, digest=graph.digest(edges))
            case Key("small", int(number), int(step), int(turn)):
                edges = self._read_edges(self.star_keys("large", step, turn), number, number + 1)
                return self._edges(graph.small_star(edges))
            case Key("resolve", int(number), int(step)):
                return self._resolve(step, number)
            case Key("openings", int(number)):
                return self._openings(number)
            case Key("probes", int(number)):
                return self._probes(number)
            case Key("scatter", int(number)):
                return Scatter(self).run(number)
            case Key("rejects" | "kept" as kind, int(number)):
                path = self.folder / f"{key}.parquet"
                schema = REJECTS if kind == "rejects" else self.schema(kind)
                order = ("row", "filter", "key") if kind == "rejects" else ("hash",)
                write_table(self._cells(kind, number), path, schema, order)
                return Result({path.name: path})
            case Key(kind, int(number)) if kind in SPLITS:
                tables = self._cells(kind, number)
                files, documents, tokens = write_shard(tables, self.folder / str(key), self.dtype)
                return Result(files, {"documents": documents, "tokens": tokens})
        raise AssertionError(f"{key} is no unit of a corpus")

    @cached_property
    def _filter_task(self) -> CorpusTasks:
        return CorpusTasks(self, self.tasks)

    # Steps over the whole source

    def _signatures(self, step: int) -> tuple[str, int] | None:
        """The column and the number of ranges of the signatures of a step; None without signatures."""
        chosen = self.steps[step] if step != NUMBERED else None
        if not isinstance(chosen, NearDuplicatesFilter):
            return None
        return signature_column(chosen), self.plan.signature_ranges(chosen.buckets)

    def other_files(self, step: int) -> list[tuple[Artifact, str]]:
        """The tables of kept documents of the corpora that a step compares with."""
        return [(other, name) for other in self.others(step) for name in other.manifest.facts["kept"]]

    def _records(self, step: int, number: int) -> Result:
        members = self.writer("members", MEMBERS, [0, self.plan.ranges])
        near = self._signatures(step)
        signed = self.writer("signatures", SIGNED, [0, near[1] if near else 0])
        columns = ["text", "columns", "row", "final", "step", *([near[0]] if near else [])]
        for batch in self.span(number, columns, before=step):
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
        signed = self.writer("signatures", SIGNED, [0, near[1]])
        for batch in read_records(other.open(f"{name}.parquet").stream(), [near[0]]):
            values = signatures(batch, near[0])
            add_signed(signed, np.full(len(values), graph.OTHER_CORPORA), values, near[1])
        return Result(signed.close())

    def record_keys(self, step: int) -> list[Key]:
        return [Key("records", number, step) for number in range(len(self.plan.spans))]

    def signed_keys(self, step: int) -> list[Key]:
        """The keys of the units that hold the members and signatures of a step."""
        others = range(len(self.other_files(step)) if self._signatures(step) else 0)
        return [*self.record_keys(step), *(Key("others", number, step) for number in others)]

    def group_keys(self, step: int) -> list[Key]:
        near = self._signatures(step)
        return [Key("groups", number, step) for number in range(near[1] if near else 0)]

    def star_keys(self, kind: str, step: int, turn: int) -> list[Key]:
        return [Key(kind, number, step, turn) for number in range(self.plan.ranges)]

    def _groups(self, step: int, number: int) -> Result:
        near = self._signatures(step)
        assert near is not None, "only steps with signatures have such units"
        rows = self.rows(self.signed_keys(step), "signatures", SIGNED, near[1], number, number + 1)
        return self._edges(graph.edges_of(*(column(rows, name) for name in SIGNED.names)))

    def _edges(self, edges: Edges, *, both: bool = True, **data: int) -> Result:
        """Writes the edges, sorted into cells by the range of their node."""
        ways = graph.both_ways(edges) if both else edges
        writer = self.writer("edges", EDGES, [0, self.plan.ranges])
        writer.add(_table(EDGES, ways), cell_of(ways.node, self.plan.ranges))
        return Result(writer.close(), {"edges": len(edges.node), **data})

    def _read_edges(self, keys: Sequence[object], first: int, end: int) -> Edges:
        table = self.rows(keys, "edges", EDGES, self.plan.ranges, first, end)
        return Edges(*(column(table, name) for name in EDGES.names))

    def _resolve(self, step: int, number: int) -> Result:
        ranges = self.plan.ranges
        members = self.rows(self.record_keys(step), "members", MEMBERS, ranges, number, number + 1)
        members = members.combine_chunks()
        if step == NUMBERED:
            verdicts = number_copies(members)
        else:
            labels = Edges(np.empty(0, np.uint64), np.empty(0, np.uint64))
            others: list[NDArray[np.uint64]] = []
            if self._signatures(step):
                labelled = self.unit(Key("labels", step=step)).data
                labels = graph.labels(self._read_edges(labelled, number, number + 1))
            else:
                others = [kept_texts(other, *cell_borders(ranges, number)) for other in self.others(step)]
            verdicts = drop_duplicates(members, labels, others)
        writer = self.writer("verdicts", VERDICTS, [0, len(self.plan.spans)])
        rows = members.take(pa.array(verdicts.concerned))
        table = _table(VERDICTS, [column(rows, "place"), verdicts.values])
        writer.add(table, column(rows, "span").astype(np.int64))
        left = tally(members, verdicts.stay, self.part.process.holdout)
        return Result(writer.close(), {"left": left, "shown": _shown(step, rows, verdicts.values)})

    # The files

    def _openings(self, number: int) -> Result:
        writer = self.writer("openings", OPENINGS, [0, self.plan.ranges])
        for batch in self.span(number, ["text", "final", "step"]):
            add_openings(writer, batch, self.part.process, self.plan.ranges, self.memory)
        return Result(writer.close())

    def _probes(self, number: int) -> Result:
        keys = self.of_spans("openings")
        rows = self.rows(keys, "openings", OPENINGS, self.plan.ranges, number, number + 1)
        assert self.part.process.repeats is not None, "only a spec with probes has such units"
        count, chosen = choose(rows, self.part.process.repeats, self.part.seed)
        return Result({}, {"candidates": count, "chosen": chosen})

    def _cells(self, kind: str, number: int) -> Iterator[pa.Table]:
        """The rows of a file, one cell at a time."""
        output = self.layout.outputs[kind]
        group, within = divmod(number, output.files_per_group)
        cells = output.borders[group + 1] - output.borders[group]
        files = list(self.files(self.of_spans("scatter"), f"{kind}-{group:05d}"))
        own = range(within * output.cells, (within + 1) * output.cells)
        return (read_cells(files, self.schema(kind), cells, cell, cell + 1) for cell in own)


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
    texts = [np.empty(0, np.uint64)]
    for name in corpus.manifest.facts["kept"]:
        table = pq.ParquetFile(corpus.open(f"{name}.parquet").stream())
        for group in range(table.num_row_groups):
            bounds = table.metadata.row_group(group).column(0).statistics
            if bounds.max >= first and bounds.min < end:
                hashes = table.read_row_group(group, columns=["hash"]).column("hash").to_numpy()
                texts.append(hashes[(hashes >= np.uint64(first)) & (hashes <= np.uint64(end - 1))])
    return np.concatenate(texts)


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
