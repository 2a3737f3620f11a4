"""The passes that make a corpus: their order, and when the units of each are removed.

Invariants:
- All work is in units of bounded memory (`corpus_work`), which any worker computes. This process adds up
  their results.
- A pass whose results exist is skipped, even when the units that it reads are already removed.
- A unit is removed when the units that read it are committed, so the store holds the tokens about twice. A
  later attempt resumes with the plan of the first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from apertus_model.data.corpora.plan import (
    KEPT_ROWS,
    REJECT_BYTES,
    REJECT_ROWS,
    CorpusPlan,
    Duplicate,
    Layout,
    Size,
    shards,
    table,
)
from apertus_model.data.corpora.planted import encoder, planted_documents, to_json, tokenised
from apertus_model.data.corpora.probes import probes_of
from apertus_model.data.corpora.scatter import EQUAL
from apertus_model.data.corpora.selection import CHARACTERS, DROPPED
from apertus_model.data.corpora.span import resolve_key, step_name, unit_of
from apertus_model.data.corpora.units import SHOWN, CorpusWork
from apertus_model.data.corpora.verdicts import NOTHING, Tally
from apertus_model.data.documents.parsed import fix_of
from apertus_model.data.documents.readers import check_holdout
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.work import run_units
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.errors import counted
from specs.filters import labels
from specs.job import Job

SPLITS = ("train", "validation")


class Passes:
    """The passes of one attempt, in the order of the methods."""

    def __init__(self, job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
        self.work = CorpusWork(job, attempt)
        self._attempt = attempt
        self._progress, self._stop = progress, stop

    def _run(self, keys: Sequence[str], on_commit: Callable[[str], None] = lambda key: None) -> None:
        """Runs a pass over the documents that the filter tasks left."""
        self._run_units(keys, on_commit, here=self.work.plan.small)

    def _run_units(
        self, keys: Sequence[str], on_commit: Callable[[str], None] = lambda key: None, *, here: bool = False
    ) -> None:
        self.work.keys = keys
        run_units(
            self.work,
            self._attempt,
            self._stop,
            self._progress,
            processes=self.work.part.WORKERS,
            here=here,
            on_commit=on_commit,
        )

    def _all_there(self, keys: Sequence[str]) -> bool:
        return all(self._attempt.unit(key) is not None for key in keys)

    def _remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._attempt.remove_unit(key)

    def plant(self) -> None:
        """Commits the planted documents, which later passes read."""
        if self.work.part.process.planted and self._attempt.unit("planted") is None:
            facts, file = self.work.tokenizer.manifest.facts, self.work.tokenizer.local("tokenizer.json")
            planted = tokenised(planted_documents(self.work.part), encoder(file, facts["bos_id"]))
            self._attempt.commit_unit("planted", data=to_json(planted))

    def filter(self) -> None:
        """Runs the filter tasks, and commits the plan that follows from their results."""
        if self._attempt.unit("plan") is not None:
            return
        self._run_units(list(self.work.tasks))
        tasks: dict[str, Size] = {}
        read, rejected = Counter[str](), Counter[str]()
        for key in self.work.tasks:
            unit = unit_of(self._attempt, key)
            size = sum(unit.files[name].size for name in ("tokens.bin", "documents.parquet"))
            tasks[key] = Size(size, unit.data["records"], unit.data["tokenised"])
            read.update(unit.data["read"])
            rejected.update(unit.data["rejected"])
        plan = CorpusPlan.make(tasks, self.work.part.memory.bytes, dict(read), dict(rejected))
        self._attempt.commit_unit("plan", data=plan.model_dump())

    def resolve(self) -> None:
        """Runs the steps over the whole source, and commits the layout that follows from their results."""
        if self._attempt.unit("layout") is not None:
            return
        work = self.work
        left, shown = NOTHING, []
        for step in work.decided:
            keys = [resolve_key(step, number) for number in range(work.plan.ranges)]
            if not self._all_there(keys):
                self._compare(step)
                self._run(keys)
            self._remove([*work.signed_keys(step), *self._labelled(step), f"labels-{step_name(step)}"])
            data = [unit_of(self._attempt, key).data for key in keys]
            left = sum((Tally(*map(_tuple, one["left"])) for one in data), NOTHING)
            found = sorted({tuple(pair) for one in data for pair in one["shown"]}, key=_by_place)[:SHOWN]
            shown += [Duplicate(step=step, text=text, kept=kept) for text, kept in found]
        self._check(left)
        layout = self._layout(left, shown)
        self._attempt.commit_unit("layout", data=layout.model_dump())

    def _compare(self, step: int) -> None:
        """Runs the units from which a step reads its members and labels."""
        work, name = self.work, step_name(step)
        self._run(work.signed_keys(step))
        if not (groups := work.group_keys(step)):
            return
        self._run(groups)
        edges = sum(unit_of(self._attempt, key).data["edges"] for key in groups)
        labelled = groups if not edges else [f"components-{name}"]
        if edges and work.plan.fits(edges):
            self._run(labelled)
        elif edges:
            labelled = self._stars(step)
        if self._attempt.unit(f"labels-{name}") is None:
            self._attempt.commit_unit(f"labels-{name}", data=labelled)

    def _stars(self, step: int) -> list[str]:
        """Runs rounds until one changes nothing. Returns the keys of the units that hold the stars."""
        before, turn = None, 0
        while True:
            large, small = (self.work.star_keys(kind, step, turn) for kind in ("large", "small"))
            self._run(large)
            digest = sum(unit_of(self._attempt, key).data["digest"] for key in large) % 2**64
            if digest == before:
                return self.work.star_keys("small", step, turn - 1)
            before = digest
            self._run(small)
            turn += 1

    def _labelled(self, step: int) -> list[str]:
        """The keys of all stored units of a step between the signatures and the labels."""
        name = step_name(step)
        kinds = tuple(f"{kind}-{name}" for kind in ("groups", "components", "large", "small"))
        stored = self._attempt.store.names(f"{self._attempt.job.path}/units")
        return [unit.removesuffix(".json") for unit in stored if unit.startswith(kinds)]

    def _check(self, left: Tally) -> None:
        """SourceError when no document is left, or as `check_holdout` says."""
        process, (train, held_out) = self.work.part.process, left.documents
        total = train + held_out
        if not total:
            counts = self._dropped()
            fix = fix_of(counts["rejected"] | counts[DROPPED], "check the globs, the format or the filters")
            raise SourceError(
                f"no document of {self.work.part.source.url} is left: {counts_line(counts)}. Fix: {fix}"
            )
        usual = type(process).model_fields["holdout"].default
        least = left.least if total > 1 else None
        check_holdout(process.holdout, usual, held_out, total, counted(total, "document"), least)

    def _dropped(self) -> dict[str, dict[str, int]]:
        """The counts of the documents that were read, rejected and dropped, when none is left to write."""
        dropped = Counter[str]()
        names = labels(self.work.steps)
        for number in range(len(self.work.plan.spans)):
            for batch in self.work.span(number).read(["step"]):
                steps = [*batch.gone[batch.gone >= 0], *batch.step[batch.gone < 0]]
                dropped.update(names[step] for step in steps if 0 <= step < len(names))
        return {**self._read_counts(), DROPPED: dict(dropped)}

    def _layout(self, left: Tally, shown: list[Duplicate]) -> Layout:
        work, plan, part = self.work, self.work.plan, self.work.part
        copies = [one for documents in work.planted.values() for one in documents]
        left += Tally(
            (sum(one.bucket for one in copies), 0),
            (sum(one.bucket * (len(one.token_ids) + 1) for one in copies), 0),
            2**64,
        )
        outputs = {
            split: shards(documents, tokens, part.shard_tokens, work.dtype.itemsize, plan.memory)
            for split, documents, tokens in zip(SPLITS, left.documents, left.tokens, strict=True)
        }
        kept = sum(left.documents)
        row = work.schema("kept")
        signature_bytes = sum(8 * field.type.list_size for field in row if field.name != "hash")
        outputs["kept"] = table(kept, KEPT_ROWS, 16 + signature_bytes, plan.memory)
        outputs["rejects"] = table(plan.documents - kept, REJECT_ROWS, REJECT_BYTES, plan.memory)
        probes = []
        if part.process.repeats is not None:
            openings = [f"openings-{number:05d}" for number in range(len(plan.spans))]
            keys = [f"probes-{number:05d}" for number in range(plan.ranges)]
            if not self._all_there(keys):
                self._run(openings)
                self._run(keys)
            self._remove(openings)
            probes = probes_of([unit_of(self._attempt, key).data for key in keys], part.process.repeats)
            if len(probes) >= left.documents[0]:
                raise SourceError(
                    f"all training documents of {part.source.url} became probes."
                    " Fix: ask for fewer probes, or add documents"
                )
        return Layout(outputs=outputs, probes=probes, shown=shown if part.process.examples else [])

    def scatter(self) -> tuple[dict[str, Any], int]:
        """Sorts the documents by their files in the corpus. Returns the counts of all documents, and the
        number of those that are left out because they are equal to a planted one."""
        work = self.work
        spans = {f"scatter-{number:05d}": tasks for number, tasks in enumerate(work.plan.spans)}
        self._run(list(spans), lambda key: self._remove(spans[key]))
        stored = self._attempt.store.names(f"{self._attempt.job.path}/units")
        self._remove(
            [name.removesuffix(".json") for name in stored if name.startswith(("resolve-", "probes-"))]
        )
        total: dict[str, Counter[str]] = {
            name: Counter() for name in (DROPPED, CHARACTERS, "replaced", EQUAL)
        }
        for key in spans:
            for name, values in unit_of(self._attempt, key).data.items():
                total[name].update(values)
        names = labels(work.steps)
        counts = {
            **self._read_counts(),
            **{group: {step: total[group][step] for step in names} for group in (DROPPED, CHARACTERS)},
            "replaced": {kind: total["replaced"][kind] for kind in work.part.process.replaced},
        }
        return counts, total[EQUAL]["documents"]

    def _read_counts(self) -> dict[str, dict[str, int]]:
        return {"read": self.work.plan.read, "rejected": self.work.plan.rejected}

    def write(self) -> dict[str, dict[str, int]]:
        """Writes the files of the corpus. Returns the documents and tokens of each shard, by its name."""
        layout = self.work.layout
        names = {kind: files_of(layout, kind) for kind in layout.outputs}
        keys = [key for some in names.values() for key in some]
        committed: set[str] = set()

        def used_up(key: str) -> None:
            """Removes the rows from which a group of files was written, once all its files are committed."""
            committed.add(key)
            kind, _, number = key.partition("-")
            size = layout.outputs[kind].files_per_group
            group = int(number) // size
            if committed >= set(names[kind][group * size : (group + 1) * size]):
                for span in range(len(self.work.plan.spans)):
                    unit = unit_of(self._attempt, f"scatter-{span:05d}")
                    self._attempt.remove_files(unit, [f"{kind}-{group:05d}"])

        self._run(keys, used_up)
        found: dict[str, dict[str, int]] = {}
        for key in keys:
            unit = unit_of(self._attempt, key)
            self._attempt.adopt(unit, unit.files)
            if unit.data is not None:
                found[key] = unit.data
        return found


def files_of(layout: Layout, kind: str) -> list[str]:
    """The names of the files of one kind, which are also the keys of the units that write them."""
    return [f"{kind}-{number:05d}" for number in range(layout.outputs[kind].files)]


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _by_place(pair: tuple[int, ...]) -> bytes:
    return pair[0].to_bytes(8, "little")


def counts_line(counts: dict[str, dict[str, int]]) -> str:
    """The counts in words: `812 documents (5,021,344 bytes) read, rejected: 2 not_utf8, dropped: 7 pii`."""
    read = counts["read"]
    text = f"{counted(read['documents'], 'document')} ({counted(read['bytes'], 'byte')}) read"
    for group in ("rejected", "dropped"):
        parts = [f"{number} {name}" for name, number in sorted(counts[group].items()) if number]
        text += f", {group}: {', '.join(parts)}" if parts else ""
    return text
