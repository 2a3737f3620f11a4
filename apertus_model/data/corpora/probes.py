"""Chooses the documents that memorisation probes are cut from.

A candidate is a training document of more than `length` tokens whose first `length // 2` tokens open no other
document: training sees the continuation of licence headers and templates more often than stated. The
candidates with the smallest keyed hashes of their texts are chosen.

Invariant: documents with the same opening are in one range of hashes, whose size bounds the memory.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from apertus_model.data.corpora.duplicates import bytes_hash
from apertus_model.data.corpora.exchange import CellWriter, cell_of
from apertus_model.data.corpora.plan import Probe
from apertus_model.data.corpora.records import column
from apertus_model.data.corpora.shuffle import shuffle_keys
from apertus_model.data.corpora.state import SpanBatch, blocks
from apertus_model.data.corpora.verdicts import is_held_out
from infra.store.inputs import SourceError
from specs.stages.corpus import CorpusSource, RepeatedProbes

OPENINGS = pa.schema([("opening", pa.uint64()), ("text", pa.uint64()), ("candidate", pa.bool_())])


def add_openings(
    writer: CellWriter, batch: SpanBatch, process: CorpusSource, ranges: int, memory: int
) -> None:
    assert process.repeats is not None, "only a spec with probes has openings"
    length = process.repeats.length
    texts, final = column(batch.records, "text"), column(batch.records, "final")
    held_out = is_held_out(final, process.holdout)
    entries: list[tuple[int, int, bool]] = []
    for rows, sizes, tokens in blocks(batch, memory):
        ends = np.cumsum(sizes)
        for row, size, end in zip(rows.tolist(), sizes.tolist(), ends.tolist(), strict=True):
            if batch.gone[row] < 0 and size > length // 2:
                opening = tokens[end - size : end - size + length // 2].astype("<u4").tobytes()
                entries.append((bytes_hash(opening), int(texts[row]), size > length and not held_out[row]))
    hashes = np.array([opening for opening, _, _ in entries], np.uint64)
    columns = [hashes, [text for _, text, _ in entries], [candidate for _, _, candidate in entries]]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, OPENINGS, strict=True)]
    writer.add(pa.Table.from_arrays(arrays, schema=OPENINGS), cell_of(hashes, ranges))


def choose(rows: pa.Table, repeats: RepeatedProbes, seed: int) -> tuple[int, list[list[int]]]:
    """The number of candidates in a range, and the first candidates as (keyed hash, text)."""
    opening, text = column(rows, "opening"), column(rows, "text")
    candidate = np.asarray(rows.column("candidate").to_pylist(), bool)
    _, first, counts = np.unique(opening, return_index=True, return_counts=True)
    chosen = first[counts == 1]
    texts = text[chosen[candidate[chosen]]]
    keys = shuffle_keys(texts, np.zeros(len(texts), np.uint32), seed, "probes")
    order = np.lexsort((texts, keys))[: len(repeats.buckets) * repeats.per_bucket]
    return len(texts), [[int(keys[i]), int(texts[i])] for i in order]


def probes_of(ranges: list[dict[str, Any]], repeats: RepeatedProbes) -> list[Probe]:
    """The probes, from the results of `choose` of all ranges. SourceError if there are too few candidates."""
    needed = len(repeats.buckets) * repeats.per_bucket
    candidates = sum(result["candidates"] for result in ranges)
    if candidates < needed:
        raise SourceError(
            f"{len(repeats.buckets)} buckets of {repeats.per_bucket} probes need {needed} training documents"
            f" of more than {repeats.length} tokens that begin differently; there are {candidates}. Fix:"
            " ask for fewer or shorter probes, or add documents"
        )
    chosen = sorted((key, text) for result in ranges for key, text in result["chosen"])[:needed]
    return [
        Probe(text=text, bucket=repeats.buckets[position // repeats.per_bucket])
        for position, (_, text) in enumerate(chosen)
    ]
