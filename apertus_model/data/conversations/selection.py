"""Decides which conversations of a source are kept, by the steps over the whole source and by `share` or
`count`, when tasks have judged them one by one (`corpora.selection`).

Invariants:
- The outcome equals that of applying each step to the whole source in turn. It is a function of the set of
  conversations, of the seed, and of the sets that the parts under `not_in` keep.
- Of similar conversations, the one with the smallest hash stays; none when a part under `not_in` keeps one.

Memory: about 280 bytes for each conversation that reaches the first step over the whole source (or is kept,
if there is no such step), of which 79 are needed while such a step is resolved, one array of values at a time
(measured); 48 for each conversation of a part under `not_in`; and about 100 for each row of the table of
rejects, which is sorted in memory. So 10^7 conversations take about 3 GB.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.corpora.duplicates import first_alike
from apertus_model.data.corpora.selection import global_steps
from apertus_model.data.tokens.packing import load_array
from infra.store import Artifact
from specs.base import canonical_json
from specs.filters import GLOBAL_FILTERS, ExactDuplicatesFilter, FilterSpec, NearDuplicatesFilter, labels
from specs.stages.conversations import ConversationSource

KEPT = "kept.npy"
HASHES = np.dtype([("conversation", "<u8"), ("answer", "<u8")])
"""A row of `kept.npy`: the `text_hash` of a kept conversation's text and of its answer, as filters read
them."""


def buckets_of(step: FilterSpec) -> int:
    """The number of values of each conversation that a step over the whole source compares."""
    return step.buckets if isinstance(step, NearDuplicatesFilter) else 1


class ComparedValues:
    """The values of all records that the steps over the whole source compare: a file (buckets, records) for
    each task and step. `seen`: the parts under `not_in`, by step."""

    def __init__(
        self, filters: Sequence[FilterSpec], tasks: Sequence[dict[str, Path]], seen: dict[int, list[Artifact]]
    ) -> None:
        self._files = {
            step: [files[f"compared-{step}.npy"] for files in tasks] for step in global_steps(filters)
        }
        self._seen = {
            step: [_kept_file(filters[step], part) for part in parts] for step, parts in seen.items()
        }

    def own(self, step: int) -> Iterator[NDArray[np.uint64]]:
        """The values of the records, (records,), for each bucket."""
        # opened for each use: there can be more tasks than files that a process may have open
        for bucket in range(len(load_array(self._files[step][0]))):
            yield np.concatenate([np.array(load_array(file)[bucket]) for file in self._files[step]])

    def seen(self, step: int, bucket: int) -> NDArray[np.uint64]:
        """The values of a bucket for all conversations of the parts under `not_in`: (conversations,)."""
        parts = [
            np.array(load_array(file)[column] if column else load_array(file)[bucket])
            for file, column in self._seen.get(step, [])
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def kept_name(step: FilterSpec) -> str:
    """The key, in the facts of an artifact, of the file by which a step of near-duplicates compares its kept
    conversations. Equal settings have equal keys."""
    return canonical_json(step.identity_fields())


def _kept_file(step: FilterSpec, part: Artifact) -> tuple[Path, str]:
    """The file of a part under `not_in` that a step reads, and its column."""
    if isinstance(step, ExactDuplicatesFilter):
        return part.local(KEPT), step.of
    return part.local(part.manifest.facts["compared"][kept_name(step)]), ""


class Resolution(NamedTuple):
    gone: NDArray[np.int16]  # (records,): the step over the whole source that drops each, else -1
    # (records,): size of the group of similar records where `gone`; 0 if a part under `not_in` has one
    group: NDArray[np.int64]
    alive: NDArray[np.bool_]  # (records,): whether each passes all steps
    dropped: dict[str, int]  # number of records, by label of the step


def resolve(
    filters: Sequence[FilterSpec],
    step_of: NDArray[np.int16],
    order: NDArray[np.int64],
    compared: ComparedValues,
) -> Resolution:
    """Decides the steps over the whole source. `step_of`: (records,), the step that dropped each in its task,
    or the number of steps; `order`: (records,), indices sorted by the hash of the content."""
    alive = np.ones(len(step_of), bool)
    gone, group = np.full(len(step_of), -1, np.int16), np.zeros(len(step_of), np.int64)
    dropped: dict[str, int] = {}
    for index, label in enumerate(labels(list(filters))):
        if isinstance(filters[index], GLOBAL_FILTERS):
            members = order[alive[order] & (step_of[order] > index)]
            before = len(compared.seen(index, 0))
            buckets = (
                np.concatenate([compared.seen(index, bucket), values[members]])
                for bucket, values in enumerate(compared.own(index))
            )
            first = first_alike(before + len(members), buckets)
            sizes, first = np.bincount(first, minlength=len(first)), first[before:]
            twice = first != before + np.arange(len(members))
            out = np.zeros(len(step_of), bool)
            out[members[twice]] = True
            gone[out] = index
            group[members] = np.where(first < before, 0, sizes[first])
        else:
            out = alive & (step_of == index)
        alive &= ~out
        dropped[label] = int(out.sum())
    return Resolution(gone, group, alive, dropped)


def chosen(
    process: ConversationSource, places: NDArray[np.uint64], contents: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """(n,): whether `share` or `count` chooses each of n conversations, which differ in content. `places`:
    hashes of seed and content; `contents`: of the content, which decides between equal places."""
    if process.share is not None:
        return places < int(Fraction(repr(process.share)) * 2**64)
    result = np.ones(len(places), bool)
    if process.count is not None:
        result[np.lexsort((contents, places))[process.count :]] = False
    return result
