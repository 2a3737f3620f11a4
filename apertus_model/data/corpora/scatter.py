"""Distributes the documents of a span among the files of a corpus, those that stay to their shards and the
others to the table of rejects, and counts the outcomes.

Invariants:
- Every document that was read is counted once: kept, or dropped under the label of one step.
- A rejection has the hash 0, since no text was read.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from apertus_model.data.corpora import tallies
from apertus_model.data.corpora.duplicates import OTHER_CORPORA, text_hash
from apertus_model.data.corpora.examples import Row, cut, from_jsonl, joined
from apertus_model.data.corpora.exchange import CellWriter, cell_of
from apertus_model.data.corpora.records import REJECTED as NOT_READ
from apertus_model.data.corpora.records import SIDE, column
from apertus_model.data.corpora.selection import CHARACTERS, DROPPED
from apertus_model.data.corpora.shuffle import shuffle_keys, token_column
from apertus_model.data.corpora.state import CorpusState, SpanBatch, blocks
from apertus_model.data.corpora.verdicts import MOST_PARTS, is_held_out
from apertus_model.tokenizer_files import open_tokenizer
from apertus_model.work import Result
from specs.filters import NearDuplicatesFilter, labels

EQUAL = "equal_to_planted"


class Scatter:
    def __init__(self, state: CorpusState) -> None:
        self._state = state
        self._process, self._seed = state.part.process, state.part.seed
        self._labels = labels(state.steps)
        self._writers: dict[str, CellWriter] = {
            name: state.writer(name, state.schema(name), output.borders)
            for name, output in state.layout.outputs.items()
        }
        self._probes = {probe.text: probe for probe in state.layout.probes}
        self._probe_texts = np.array(sorted(self._probes), np.uint64)
        self._wanted = {text for pair in state.layout.shown for text in (pair.text, pair.kept)}
        self._tokenizer: Tokenizer | None = None
        self._texts: dict[str, str] = {}
        self._tokens: dict[str, list[int]] = {}
        self._counts = {name: Counter[str]() for name in (DROPPED, CHARACTERS, "replaced", EQUAL)}
        self._tally = tallies.SCHEMA.empty_table()
        copied = [document for documents in state.planted.values() for document in documents]
        self._planted = {text_hash(document.text): document for document in copied}
        self._planted_texts = np.array(sorted(self._planted), np.uint64)
        self._candidates: list[Row] = []

    def run(self, number: int) -> Result:
        """Scatters the span, batch by batch."""
        self._candidates = self._task_examples(number)
        if number == 0:
            self._add_planted()
        for batch in self._state.span(number):
            self._count(batch)
            self._reject(batch)
            self._see_examples(batch)
            for rows, sizes, tokens in blocks(batch, self._state.memory):
                self._place(batch, rows, sizes, tokens.astype(self._state.dtype, copy=False))
        files: dict[str, Path] = {}
        for writer in self._writers.values():
            files |= writer.close()
        files[tallies.FILE] = self._state.folder / tallies.FILE
        pq.write_table(self._tally, files[tallies.FILE], compression="zstd")
        files["examples.json"] = self._state.folder / "examples.json"
        shown = {"rows": joined(self._candidates), "texts": self._texts, "probes": self._tokens}
        files["examples.json"].write_text(json.dumps(shown))
        return Result(files, {name: dict(counts) for name, counts in self._counts.items()})

    def _count(self, batch: SpanBatch) -> None:
        characters = column(batch.records, "characters")
        last = np.where(batch.gone >= 0, batch.gone, batch.step)
        for index, label in enumerate(self._labels):
            here = last == index
            self._counts[DROPPED][label] += int(here.sum())
            self._counts[CHARACTERS][label] += int(characters[here].sum())
        kept = last == len(self._labels)
        equal = kept & np.isin(column(batch.records, "final"), self._planted_texts)
        self._counts[EQUAL]["documents"] += int(equal.sum())
        kept &= ~equal
        was_read = batch.step != NOT_READ
        closed = np.where(batch.gone < 0, column(batch.records, "excluded-tokens"), 0)
        outcomes = pa.array([*self._labels, tallies.KEPT]).take(pa.array(last[was_read]))
        records, tokens = batch.records.filter(pa.array(was_read)), np.where(kept, batch.sizes, closed)
        self._tally = tallies.added(self._tally, outcomes, records, tokens[was_read])
        for kind in self._process.replaced:
            counted = column(batch.records, f"replaced-{kind}")[kept]
            self._counts["replaced"][kind] += int(counted.sum(dtype=np.int64))

    # Rejects

    def _reject(self, batch: SpanBatch) -> None:
        rows = np.flatnonzero((batch.gone >= 0) | (batch.step < len(self._labels)))
        table = batch.records.take(pa.array(rows))
        hashes, row = column(table, "text"), column(table, "row")
        task_reasons = table.column("reason").to_pylist()
        filters, reasons = [], []
        for text, at, reason in zip(hashes.tolist(), rows.tolist(), task_reasons, strict=True):
            gone = batch.gone[at] >= 0
            step = int(batch.gone[at] if gone else batch.step[at])
            filters.append("rejected" if step == NOT_READ else self._labels[step])
            reasons.append(self._duplicate(step, text, int(batch.value[at])) if gone else reason)
        keys = np.where(column(table, "step") == NOT_READ, row, hashes)
        named = (table.column(name).cast(pa.string()) for name in ("id", "url"))
        self._write("rejects", keys, [keys, row, hashes, *named, filters, reasons])

    def _duplicate(self, step: int, text: int, value: int) -> str:
        """The reason for dropping a duplicate: the text or the corpora that it duplicates."""
        if value == text:
            return f"the same text as {value:016x}, which stays"
        others = [other.path for other in self._state.others(step)]
        if isinstance(self._state.steps[step], NearDuplicatesFilter):
            like = f"a document of {' or '.join(others)}" if value == OTHER_CORPORA else f"{value:016x}"
            return f"like {like}"
        assert value < MOST_PARTS, "the number of a part"
        return f"the same text as a document of {others[value]}"

    # Documents

    def _place(
        self, batch: SpanBatch, rows: NDArray[np.int64], sizes: NDArray[np.int64], tokens: NDArray[np.integer]
    ) -> None:
        """Puts documents of a batch, with their tokens, into the cells of their keys."""
        texts = column(batch.records, "text")[rows]
        values = token_column(tokens, sizes)
        self._decode(texts, values)
        final = column(batch.records, "final")[rows]
        stays = (batch.gone[rows] < 0) & ~np.isin(final, self._planted_texts)
        some = batch.records.take(pa.array(rows[stays]))
        signed = some.select(self._state.schema("kept").names[1:])
        self._write("kept", texts[stays], [texts[stays], *signed.columns])
        held_out = is_held_out(final, self._process.holdout)
        probes = stays & ~held_out & np.isin(texts, self._probe_texts)
        self._add_probes(texts[probes], values.filter(pa.array(probes)))
        copies = batch.copy[rows]
        for name, here in (("train", stays & ~held_out & ~probes), ("validation", stays & held_out)):
            keys = shuffle_keys(texts[here], copies[here], self._seed, name)
            side = batch.records.select(SIDE).take(pa.array(rows[here]))
            arrays = [keys, texts[here], copies[here], values.filter(pa.array(here)), *side.columns]
            self._write(name, keys, arrays)

    def _write(self, name: str, keys: NDArray[np.uint64], arrays: list[Any]) -> None:
        """Puts rows of the files `name` into the cells of their keys."""
        if len(keys):
            columns = [values if isinstance(values, pa.Array) else pa.array(values) for values in arrays]
            table = pa.Table.from_arrays(columns, schema=self._state.schema(name))
            self._writers[name].add(table, cell_of(keys, self._state.layout.outputs[name].all_cells))

    def _add_probes(self, texts: NDArray[np.uint64], values: pa.LargeBinaryArray) -> None:
        """Adds the copies of probes, which end with the end-of-document token, in place of documents."""
        repeats = self._process.repeats
        for text, value in zip(texts.tolist(), values, strict=True):
            assert repeats is not None, "only a spec with probes has some"
            ids = np.frombuffer(value.as_buffer(), self._state.dtype)[: repeats.length]
            self._tokens[f"{text:016x}"] = ids.tolist()
            self._add_copies(text, ids, self._probes[text].bucket, "copies of probes")

    def _add_planted(self) -> None:
        for text, document in sorted(self._planted.items()):
            ids = np.array(document.token_ids, self._state.dtype)
            self._add_copies(text, ids, document.bucket, "copies of planted documents")

    def _add_copies(self, text: int, ids: NDArray[np.integer], count: int, name: str) -> None:
        """Adds copies to the training split, each with the end-of-document token appended."""
        if not count:
            return
        eos = self._state.tokenizer.manifest.facts["eos_id"]
        whole = np.append(ids, np.array([eos], self._state.dtype)).tobytes()
        numbers, of_text = np.arange(count, dtype=np.uint32), np.full(count, text, np.uint64)
        keys = shuffle_keys(of_text, numbers, self._seed, name)
        nothing = [pa.nulls(count, pa.large_string()) for _ in SIDE]
        tokens = pa.array([whole] * count, pa.large_binary())
        self._write("train", keys, [keys, of_text, numbers, tokens, *nothing])

    # Examples

    def _task_examples(self, number: int) -> list[Row]:
        rows: list[Row] = []
        for file in self._state.files(self._state.plan.spans[number], "examples.jsonl"):
            rows = joined([*rows, *({**row, "alive": False} for row in from_jsonl(file.bytes()))])
        return rows

    def _see_examples(self, batch: SpanBatch) -> None:
        """Notes which candidates are not dropped as duplicates."""
        texts, columns = column(batch.records, "text"), column(batch.records, "columns")
        wanted = np.array([int(row["hash"], 16) for row in self._candidates], np.uint64)
        for at in np.flatnonzero(np.isin(texts, wanted) & (batch.gone < 0)).tolist():
            for row in self._candidates:
                if (int(row["hash"], 16), int(row["columns"], 16)) == (int(texts[at]), int(columns[at])):
                    row["alive"] = True

    def _decode(self, texts: NDArray[np.uint64], values: pa.LargeBinaryArray) -> None:
        """Decodes and keeps the texts of duplicates that are shown."""
        if not self._wanted:
            return
        for at in np.flatnonzero(np.isin(texts, np.array(sorted(self._wanted), np.uint64))).tolist():
            name = f"{int(texts[at]):016x}"
            if name not in self._texts:
                if self._tokenizer is None:
                    self._tokenizer = open_tokenizer(self._state.tokenizer.local("tokenizer.json"))
                ids = np.frombuffer(values[at].as_buffer(), self._state.dtype)[1:-1]
                self._texts[name] = cut(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))
