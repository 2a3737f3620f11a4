"""`apertus cp`: copies a run with its lineage to another store, where it can be continued.

Invariants: the record of the run is written last, when every stored artifact that it refers to is copied.
After a copy of some stages, it still reaches all that it reached before: `gc` removes nothing due to a copy.
"""

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
        chosen = set().union(*(select(plan, stage, None, "--stages") for stage in stages))
        nodes = [node for node in plan.graph.nodes.values() if not stages or node.stage in chosen]
        parts: Parts = {node.name: (node.path, node.end_step) for node in nodes}
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
    sizes: dict[str, int] = {}
    for contents, step in artifacts:
        for marker in markers_of(contents, step):
            sizes |= {name: record.size for name, record in marker.all_files.items()}
    with bytes_progress(console, "copying") as progress:
        task = progress.add_task("", total=sum(sizes.values()))
        done = copy_artifacts(
            source, other, artifacts, lambda name, size: progress.update(task, advance=size)
        )
    _record(other, name, parts, spec, some=bool(stages))
    result = f"{counted(done.files, 'file')} ({quantity(done.bytes)}B) copied and checked"
    if done.present_files:
        result += f", {counted(done.present_files, 'file')} ({quantity(done.present_bytes)}B) there before"
    copied = f"{escape(name)} is in {escape(other.url)}: {counted(done.artifacts, 'artifact')}, {result}"
    console.print(copied, soft_wrap=True)
    return done


def _chosen(record: runs.RunRecord, stages: list[str]) -> Parts:
    """The parts of some stages of a record; what they were made from follows from the store."""
    if not stages:
        return record.parts
    names = {name: {name, name.split("/")[0].split(".")[0]} for name in record.parts}
    for stage in stages:
        if not any(stage in of_part for of_part in names.values()):
            there = ", ".join(record.parts)
            raise StoreError(f"run '{record.run}' has no stage '{stage}'; its parts are {there}")
    return {name: at for name, at in record.parts.items() if names[name] & {*stages}}


def _record(store: Store, name: str, parts: Parts, spec: dict[str, Any], *, some: bool) -> None:
    """Makes the copy a named run of the target, unless its last record says the same. `some`: of some stages
    only, so the parts of the last record stay; of a trajectory in both, the furthest step."""
    if name in runs.names(store):
        last = runs.last(store, name)
        if some:
            parts = last.parts | {
                part: (path, step)
                for part, (path, step) in parts.items()
                if path != last.parts.get(part, ("", None))[0] or (step or 0) >= (last.parts[part][1] or 0)
            }
        if parts == last.parts and (some or spec == last.spec):
            return
    runs.write(store, name, parts, spec)
