"""The passes that make a corpus: their order, and when the units of each are removed.

Invariants:
- All work is in units of bounded memory, which any worker computes. This process adds up their results.
- A pass whose results exist is skipped, even when the units that it reads are already removed.
- A unit is removed when the units that read it are committed, so the store holds the tokens about twice. A
  later attempt resumes with the plan of the first one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from apertus_model.data.corpora.examples import mixed
from apertus_model.data.corpora.plan import (
    KEPT_ROWS,
    REJECT_BYTES,
    REJECT_ROWS,
    SIDE_BYTES,
    SPLITS,
    CorpusLayout,
    CorpusPlan,
    Duplicate,
    Key,
    Output,
    Size,
    output,
    parts,
    step_name,
)
from apertus_model.data.corpora.planted import encoder, planted_documents, summary, to_json, tokenised
from apertus_model.data.corpora.probes import probes_of
from apertus_model.data.corpora.records import read_line
from apertus_model.data.corpora.scatter import EQUAL
from apertus_model.data.corpora.selection import CHARACTERS, DROPPED
from apertus_model.data.corpora.units import SHOWN, CorpusUnits
from apertus_model.data.corpora.verdicts import NOTHING, Tally, total
from apertus_model.data.documents.parsed import fix_of
from apertus_model.data.documents.readers import check_holdout
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.work import run_units
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.errors import counted
from specs.filters import labels


class CorpusPasses:
    """The passes of one attempt, in the order of the methods."""

    def __init__(self, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
        self.work = CorpusUnits(attempt)
        self._attempt = attempt
        self._progress, self._stop = progress, stop

    def _run(
        self, keys: Sequence[object], on_commit: Callable[[str], None] = lambda key: None, *, here: bool
    ) -> None:
        """Runs a pass. `here`: in this process, whatever the launch settings say."""
        self.work.units = list(map(str, keys))
        run_units(
            self.work,
            self._attempt,
            self._stop,
            self._progress,
            processes=self.work.part.WORKERS,
            here=here,
            on_commit=on_commit,
        )

    def _is_done(self, *keys: object) -> bool:
        return all(self._attempt.unit(str(key)) is not None for key in keys)

    def _remove(self, keys: Iterable[object]) -> None:
        for key in keys:
            self._attempt.remove_unit(str(key))

    def _stored(self, *beginnings: str) -> list[str]:
        """The keys of all stored units that begin in one of these ways."""
        stored = self._attempt.store.names(f"{self._attempt.job.path}/units")
        return [name.removesuffix(".json") for name in stored if name.startswith(beginnings)]

    def plant(self) -> None:
        """Commits the planted documents, which later passes read."""
        if self.work.part.process.planted and not self._is_done("planted"):
            facts, file = self.work.tokenizer.manifest.facts, self.work.tokenizer.local("tokenizer.json")
            planted = tokenised(planted_documents(self.work.part), encoder(file, facts["bos_id"]))
            self._attempt.commit_unit("planted", data=to_json(planted))

    def filter(self) -> None:
        """Runs the filter tasks, and commits the plan that follows from their results."""
        if self._is_done("plan"):
            return
        self._run(list(self.work.tasks), here=False)
        tasks: dict[str, Size] = {}
        amounts, rejected = Counter[str](), Counter[str]()
        for key in self.work.tasks:
            unit = self.work.unit(key)
            size = sum(unit.files[name].size for name in ("tokens.bin", "documents.parquet"))
            tasks[key] = Size(size, unit.data["records"], unit.data["tokenised"])
            amounts.update(unit.data["read"])
            rejected.update(unit.data["rejected"])
        plan = CorpusPlan.make(tasks, self.work.part.memory.bytes, dict(amounts), dict(rejected))
        self._attempt.commit_unit("plan", data=plan.model_dump())

    def resolve(self) -> None:
        """Runs the steps over the whole source, and commits the layout that follows from their results."""
        if self._is_done("layout"):
            return
        work = self.work
        left, shown = NOTHING, []
        for step in work.decided:
            keys = [Key("resolve", number, step) for number in range(work.plan.ranges)]
            if not self._is_done(*keys):
                self._compare(step)
                self._run(keys, here=work.plan.small)
            between = [f"{kind}-{step_name(step)}" for kind in ("groups", "components", "large", "small")]
            self._remove([*work.signed_keys(step), *self._stored(*between), Key("labels", step=step)])
            results = [work.unit(key).data for key in keys]
            left = total(result["left"] for result in results)
            duplicates = {tuple(pair) for result in results for pair in result["shown"]}
            pairs = sorted(duplicates, key=lambda pair: mixed(pair[0]))
            shown += [Duplicate(step=step, text=text, kept=kept) for text, kept in pairs[:SHOWN]]
        self._check(left)
        layout = self._layout(left, shown)
        self._attempt.commit_unit("layout", data=layout.model_dump())

    def _compare(self, step: int) -> None:
        """Runs the units from which a step reads its members and labels."""
        work, here = self.work, self.work.plan.small
        self._run(work.signed_keys(step), here=here)
        if not (groups := work.group_keys(step)):
            return
        self._run(groups, here=here)
        edges = sum(work.unit(key).data["edges"] for key in groups)
        labelled: Sequence[object] = groups if not edges else [Key("components", step=step)]
        if edges and work.plan.fits(edges):
            self._run(labelled, here=here)
        elif edges:
            labelled = self._stars(step)
        if not self._is_done(labels_key := Key("labels", step=step)):
            self._attempt.commit_unit(str(labels_key), data=list(map(str, labelled)))

    def _stars(self, step: int) -> list[Key]:
        """Runs rounds until one changes nothing. Returns the keys of the units that hold the stars."""
        before, turn, here = None, 0, self.work.plan.small
        while True:
            large, small = (self.work.star_keys(kind, step, turn) for kind in ("large", "small"))
            self._run(large, here=here)
            digest = sum(self.work.unit(key).data["digest"] for key in large) % 2**64
            if digest == before:
                return self.work.star_keys("small", step, turn - 1)
            before = digest
            self._run(small, here=here)
            turn += 1

    def _check(self, left: Tally) -> None:
        """SourceError when no document is left, or as `check_holdout` says."""
        process, (train, held_out) = self.work.part.process, left.documents
        documents = train + held_out
        if not documents:
            counts = self._dropped()
            fix = fix_of(counts["rejected"] | counts[DROPPED], "check the globs, the format or the filters")
            raise SourceError(
                f"no document of {self.work.part.source.url} is left: {counts_line(counts)}. Fix: {fix}"
            )
        usual = type(process).model_fields["holdout"].default
        least = left.least if documents > 1 else None
        check_holdout(process.holdout, usual, held_out, documents, counted(documents, "document"), least)

    def _dropped(self) -> dict[str, dict[str, int]]:
        """The counts of the documents that were read, rejected and dropped, when none is left to write."""
        dropped = Counter[str]()
        names = labels(self.work.steps)
        for number in range(len(self.work.plan.spans)):
            for batch in self.work.span(number, ["step"]):
                steps = [*batch.gone[batch.gone >= 0], *batch.step[batch.gone < 0]]
                dropped.update(names[step] for step in steps if 0 <= step < len(names))
        return {**self._read_counts(), DROPPED: {name: dropped[name] for name in names}}

    def _layout(self, left: Tally, shown: list[Duplicate]) -> CorpusLayout:
        work, plan, part = self.work, self.work.plan, self.work.part
        planted = summary(work.planted).values()
        copies, tokens = (sum(counts[name] for counts in planted) for name in ("copies", "tokens"))
        left = total([left, Tally((copies, 0), (tokens, 0), 2**64)])
        outputs: dict[str, Output] = {}
        for split, documents, tokens in zip(SPLITS, left.documents, left.tokens, strict=True):
            size = work.dtype.itemsize * tokens + SIDE_BYTES * documents
            outputs[split] = output(documents, parts(tokens, part.shard_tokens), size, plan.memory)
        kept = sum(left.documents)
        signatures = (field.type.list_size for field in work.schema("kept") if field.name != "hash")
        for name, rows, most, row_bytes in (
            ("kept", kept, KEPT_ROWS, 16 + 8 * sum(signatures)),
            ("rejects", plan.documents - kept, REJECT_ROWS, REJECT_BYTES),
        ):
            outputs[name] = output(rows, parts(rows, most), row_bytes * rows, plan.memory)
        probes = []
        if part.process.repeats is not None:
            openings = work.of_spans("openings")
            keys = [Key("probes", number) for number in range(plan.ranges)]
            if not self._is_done(*keys):
                self._run(openings, here=plan.small)
                self._run(keys, here=plan.small)
            self._remove(openings)
            probes = probes_of([work.unit(key).data for key in keys], part.process.repeats)
            if len(probes) >= left.documents[0]:
                raise SourceError(
                    f"all training documents of {part.source.url} became probes."
                    " Fix: ask for fewer probes, or add documents"
                )
        return CorpusLayout(outputs=outputs, probes=probes, shown=shown if part.process.examples else [])

    def scatter(self) -> tuple[dict[str, Any], int]:
        """Sorts the documents by their files in the corpus. Returns the counts of all documents, and the
        number of those that are left out because they are equal to a planted one."""
        work = self.work
        spans = dict(zip(map(str, work.of_spans("scatter")), work.plan.spans, strict=True))
        self._run(list(spans), lambda key: self._remove(spans[key]), here=work.plan.small)
        self._remove(self._stored("resolve-", "probes-"))
        sums = {name: Counter[str]() for name in (DROPPED, CHARACTERS, "replaced", EQUAL)}
        for key in spans:
            for name, values in work.unit(key).data.items():
                sums[name].update(values)
        names = labels(work.steps)
        counts = {
            **self._read_counts(),
            **{group: {step: sums[group][step] for step in names} for group in (DROPPED, CHARACTERS)},
            "replaced": {kind: sums["replaced"][kind] for kind in work.part.process.replaced},
        }
        return counts, sums[EQUAL]["documents"]

    def _read_counts(self) -> dict[str, dict[str, int]]:
        return {"read": self.work.plan.read, "rejected": self.work.plan.rejected}

    def write(self) -> dict[str, dict[str, int]]:
        """Writes the files of the corpus. Returns the documents and tokens of each shard, by its name."""
        layout = self.work.layout
        files = {
            name: (kind, number // output.files_per_group)
            for kind, output in layout.outputs.items()
            for number, name in enumerate(files_of(layout, kind))
        }
        missing = Counter(files.values())

        def used_up(name: str) -> None:
            """Removes the rows from which a group of files was written, once all its files are committed."""
            kind, group = files[name]
            missing[kind, group] -= 1
            if not missing[kind, group]:
                for key in self.work.of_spans("scatter"):
                    self._attempt.remove_files(self.work.unit(key), [f"{kind}-{group:05d}"])

        self._run(list(files), used_up, here=self.work.plan.small)
        counts: dict[str, dict[str, int]] = {}
        for name in files:
            unit = self.work.unit(name)
            self._attempt.adopt(unit, unit.files)
            if unit.data is not None:
                counts[name] = unit.data
        return counts


def files_of(layout: CorpusLayout, kind: str) -> list[str]:
    """The names of the files of one kind, which are also the keys of the units that write them."""
    return [str(Key(kind, number)) for number in range(layout.outputs[kind].files)]


def counts_line(counts: dict[str, dict[str, int]]) -> str:
    """The counts of the documents that were read, in words."""
    amounts = counts["read"]
    what = f"{counted(amounts['documents'], 'document')} ({counted(amounts['bytes'], 'byte')})"
    return read_line(what, counts["rejected"], counts[DROPPED])
