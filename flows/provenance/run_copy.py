"""`apertus cp`: copies a run with its lineage to another store, where it can be continued.

Invariants: the record of the run is written last, when every stored artifact that it refers to has been
copied. After a copy of some stages, the target's record of the run still reaches all that it reached before,
so that `gc` there removes nothing because of the copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from flows.format import quantity
from flows.planning.plan import make
from flows.planning.stage_choice import select
from flows.terminal import bytes_progress
from infra.store import Store, StoreError, runs
from infra.store.maintenance.transfer import Copied, closure, copy_artifacts, markers_of
from infra.store.reading.walk import Contents
from specs.errors import counted
from specs.pipeline import DEFAULT_STORE
from specs.recipe import load

Parts = dict[str, tuple[str, int | None]]


def transfer(
    console: Console, what: str, target: str, stages: list[str], store: str | None, overrides: list[str]
) -> Copied:
    """Copies what is stored of a recipe or a named run, or of `stages` and what they were made from."""
    if Path(what).suffix in (".yaml", ".yml"):
        pipeline = load(what, overrides)
        source = Store.open(store or pipeline.store)
        plan = make(pipeline, source)
        chosen = (
            set().union(*(select(plan, stage, None, "--stages") for stage in stages))
            if stages
            else set(pipeline.stages)
        )
        parts: Parts = {
            node.name: (node.path, node.end_step)
            for node in plan.graph.nodes.values()
            if node.stage in chosen
        }
        name, spec = pipeline.name, pipeline.to_json()
    else:
        source = Store.open(store or DEFAULT_STORE)
        record = runs.last(source, what)
        parts, name, spec = _chosen(record, stages), what, record.spec
    other = Store.open(target)
    if other.url == source.url:
        raise StoreError(f"source and target are the same store, {source.url}")
    artifacts = closure(source, parts.values())
    if not artifacts:
        raise StoreError(f"nothing of '{what}' is stored in {source.url}")
    amount_ = _with_progress(console, source, other, artifacts)
    _record(other, name, parts, spec, some=bool(stages))
    there = (
        f", {counted(amount_.present_files, 'file')} ({quantity(amount_.present_bytes)}B) there before"
        if amount_.present_files
        else ""
    )
    copied = (
        f"{counted(amount_.artifacts, 'artifact')}, {counted(amount_.files, 'file')}"
        f" ({quantity(amount_.bytes)}B) copied and checked{there}"
    )
    console.print(f"{escape(name)} is in {escape(other.url)}: {copied}", soft_wrap=True)
    return amount_


def _chosen(record: runs.RunRecord, stages: list[str]) -> Parts:
    """The parts of some stages of a record; what they were made from follows from the store."""
    if not stages:
        return record.parts
    chosen = {
        name: at
        for name, at in record.parts.items()
        if name in stages or name.split("/")[0].split(".")[0] in stages
    }
    for stage in stages:
        if not any(name == stage or name.split("/")[0].split(".")[0] == stage for name in chosen):
            raise StoreError(
                f"run '{record.run}' has no stage '{stage}'; its parts are {', '.join(record.parts)}"
            )
    return chosen


def _with_progress(
    console: Console, source: Store, target: Store, artifacts: list[tuple[Contents, int | None]]
) -> Copied:
    total = 0
    for contents, step in artifacts:
        named = {
            name: record for marker in markers_of(contents, step) for name, record in marker.all_files.items()
        }
        total += sum(record.size for record in named.values())
    with bytes_progress(console, "copying") as progress:
        task = progress.add_task("", total=total)
        return copy_artifacts(
            source, target, artifacts, lambda name, size: progress.update(task, advance=size)
        )


def _record(store: Store, name: str, parts: Parts, spec: dict[str, Any], *, some: bool) -> None:
    """Makes the copy a named run of the target, so that `gc` keeps it; writes nothing if its last record
    says the same. `some`: only some stages were copied, so the parts of the last record stay; for a
    trajectory that is in both, the furthest step is recorded."""
    if name in runs.names(store):
        last = runs.last(store, name)
        if some:
            earlier = {
                part for part in parts.keys() & last.parts.keys() if _earlier(parts[part], last.parts[part])
            }
            parts = last.parts | {part: at for part, at in parts.items() if part not in earlier}
        if parts == last.parts and (some or spec == last.spec):
            return
    runs.write(store, name, parts, spec)


def _earlier(one: tuple[str, int | None], other: tuple[str, int | None]) -> bool:
    """Whether `one` is an earlier step of the same trajectory."""
    return one[0] == other[0] and (one[1] or 0) < (other[1] or 0)
