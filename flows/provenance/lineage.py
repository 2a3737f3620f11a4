"""Traces a part back to its source documents, as a tree, as JSON, and for a picture
(`flows.provenance.picture`).

A lineage comes from a plan (also for parts that have not run yet), or from the store alone, for a reader who
has an exported model and no recipe.

Invariant: it only reads. For a part that has been made, licence, language and settings are those recorded
when it was made; nothing is inferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from apertus_model.data.order.mixture_recipe import FILE, MixtureRecipe
from flows.format import COLOURS, amount
from flows.planning.plan import Plan
from flows.terminal import empty_table
from infra.store import Artifact, Store, StoreError
from infra.store.documents import Manifest
from infra.store.inputs import recorded_files
from infra.store.reading.lineage import lineage
from specs.errors import counted
from specs.planted import planted_in
from specs.stages import TRAINING


@dataclass(frozen=True)
class Documents:
    """A source: files outside the store, as the parts that read them state them. Several sources may read
    the same files, in different ways. `digest`: of the files' content; `facts`: url, format, language,
    license, as far as they are known."""

    name: str
    digest: str
    facts: dict[str, Any]
    files: int = 0
    bytes: int = 0

    @property
    def key(self) -> str:
        return f"{self.name} {self.digest}"


@dataclass(frozen=True)
class Link:
    """An input: the key of an item or of documents, and the step if it is a checkpoint."""

    key: str
    step: int | None = None


@dataclass(frozen=True)
class Item:
    """One part. `action`: what a plan would do with it; `stored` or `gone` where there is no plan. `spec`:
    its identity fields."""

    key: str
    name: str
    kind: str
    fingerprint: str
    path: str
    action: str
    steps: int
    tokens: int
    spec: dict[str, Any]
    manifest: Manifest | None
    inputs: dict[str, Link]

    @property
    def metrics(self) -> dict[str, Any]:
        return self.manifest.metrics if self.manifest else {}


@dataclass
class Lineage:
    """Parts and documents by key. `roots` are the parts that were asked for."""

    store: Store
    roots: list[str] = field(default_factory=list)
    items: dict[str, Item] = field(default_factory=dict)
    documents: dict[str, Documents] = field(default_factory=dict)

    def shares(self, mixture: Item) -> dict[str, float]:
        """The share of every corpus in the samples of a mixture, by key; empty until the mixture is made."""
        try:
            sources = Artifact(self.store, mixture.path).document(FILE, MixtureRecipe).sources
        except (StoreError, OSError):
            return {}
        total = sum(source.weight for source in sources)
        return {source.path: source.weight / total for source in sources}

    def trained_on(self) -> dict[str, float]:
        """The tokens of every corpus that were trained on along the lineage, by key; a trajectory counts up
        to its furthest step in the lineage."""
        furthest: dict[str, Item] = {}
        for item in self.items.values():
            if item.kind in TRAINING and item.tokens >= furthest.get(item.path, item).tokens:
                furthest[item.path] = item
        found: dict[str, float] = {}
        for item in furthest.values():
            for key, share in self.shares_of(item).items():
                found[key] = found.get(key, 0.0) + share * item.tokens
        return found

    def shares_of(self, trained: Item) -> dict[str, float]:
        """The shares of what a part trains on, by key: those of its mixture, or 1 for its only data set."""
        data = [
            link.key
            for role, link in trained.inputs.items()
            if role.split(":")[0] in ("mixture", "conversations", "pairs")
        ]
        if "mixture" in trained.inputs:
            return self.shares(self.items[trained.inputs["mixture"].key])
        return {data[0]: 1.0} if len(data) == 1 else {}


# Made from a plan, or from the store


def of_plan(plan: Plan, names: list[str]) -> Lineage:
    """The lineage of parts of a plan."""
    found = Lineage(plan.store)

    def visit(name: str, at: int | None) -> str:
        node, step = plan.graph.nodes[name], plan.steps[name]
        key = node.path if at is None else f"{node.path}@{at}"
        if key in found.items:
            return key
        inputs: dict[str, Link] = {}
        for role, read in node.inputs.items():
            if read.node is not None:
                inputs[role] = Link(visit(read.node, read.step), read.step)
                continue
            source, listing = plan.pipeline.sources.get(read.name), plan.graph.listings.get(read.name)
            facts = source.to_json() if source else plan.graph.facts_of(plan.pipeline, read.name)
            size = (len(listing.files), listing.bytes) if listing else (0, 0)
            documents = Documents(read.name, read.fingerprint, dict(facts), *size)
            found.documents[documents.key] = documents
            inputs[role] = Link(documents.key)
        artifact = node.artifact(plan.store)
        manifest = artifact.manifest if step.action == "reuse" else None
        steps, tokens = (at - node.start_step, node.tokens_until(at)) if at is not None else (0, 0)
        action = step.action if step.stored or step.action != "reuse" else "run"
        found.items[key] = Item(
            key,
            name,
            node.kind,
            node.fingerprint,
            node.path,
            action,
            steps,
            tokens,
            node.identity,
            manifest,
            inputs,
        )
        return key

    for name in names:
        found.roots.append(visit(name, plan.graph.nodes[name].end_step))
    return found


def of_store(store: Store, path: str, step: int | None) -> Lineage:
    """The lineage of a stored artifact. StoreError when a part of it is gone."""
    found = Lineage(store)
    for ancestor in lineage(store, path, step):
        key = _key(ancestor.path, ancestor.step)
        inputs: dict[str, Link] = {}
        for role, read in ancestor.inputs.items():
            if read.place is not None:
                inputs[role] = Link(_key(read.place, read.step), read.step)
                continue
            digest = read.fingerprint
            rows = recorded_files(store, digest)
            size = (len(rows), sum(row.size for row in rows)) if rows is not None else (0, 0)
            documents = Documents(read.name or digest[:8], digest, ancestor.source(role), *size)
            if (before := found.documents.get(documents.key)) is not None:
                known = {name: value for name, value in before.facts.items() if value}
                documents = replace(documents, facts=documents.facts | known)
            found.documents[documents.key] = documents
            inputs[role] = Link(documents.key)
        action = "stored" if ancestor.manifest or ancestor.step is not None else "gone"
        identity = ancestor.identity
        found.items[key] = Item(
            *(key, ancestor.name, ancestor.kind, identity.fingerprint, ancestor.path, action),
            *(ancestor.steps, ancestor.tokens, identity.spec, ancestor.manifest, inputs),
        )
    found.roots.append(_key(path, step))
    return found


def _key(path: str, step: int | None) -> str:
    return path if step is None else f"{path}@{step}"


# Shown


def tree(found: Lineage, root: str) -> Tree:
    """A part and what it was made from. An item that is shown already is only named; the tokenizer, which
    everything reads, is then left out."""
    shown = {root}

    def grow(item: Item, branch: Tree) -> Tree:
        for role, link in item.inputs.items():
            at = f"@step={link.step}" if link.step is not None else ""
            if link.key in found.documents:
                branch.add(_documents_label(role, found.documents[link.key]))
            elif link.key in shown and role == "tokenizer":
                continue
            elif link.key in shown:
                branch.add(f"[dim]{role}:[/] {escape(found.items[link.key].name)}{at} [dim](above)[/]")
            else:
                shown.add(link.key)
                child = found.items[link.key]
                grow(child, branch.add(_label(found, child, role, at)))
        return branch

    item = found.items[root]
    return grow(item, Tree(_label(found, item, "", "")))


def _label(found: Lineage, item: Item, role: str, at: str) -> str:
    prefix = f"[dim]{role}:[/] " if role else ""
    numbers = f", {counted(item.steps, 'step')}, {amount(item.tokens)} tokens" if item.steps else ""
    action = f"[{COLOURS.get(item.action, 'green' if item.action == 'stored' else 'red')}]{item.action}[/]"
    lines = [
        f"{prefix}[bold]{escape(item.name)}[/]{at} [dim]{item.fingerprint[:8]}[/] {item.kind},"
        f" {action}{numbers}"
    ]
    return "\n".join([*lines, *(f"[dim]{escape(line)}[/]" for line in summary_lines(found, item))])


def _documents_label(role: str, documents: Documents) -> str:
    known = ("url", "format", "language", "license")
    facts = (
        ", ".join(str(documents.facts[name]) for name in known if documents.facts.get(name)) or documents.name
    )
    size = f", {counted(documents.files, 'file')}, {amount(documents.bytes)}B" if documents.files else ""
    return f"[dim]{role}:[/] {escape(documents.name)} [dim]{documents.digest[:8]}[/] {escape(facts)}{size}"


def summary_lines(found: Lineage, item: Item) -> list[str]:
    """A few lines about a finished part: documents, filters and planted documents of data, shares of a
    mixture."""
    metrics = item.metrics
    if item.kind in ("corpus", "conversations"):
        made = list(_data_lines(metrics)) if isinstance(metrics.get("train"), dict) else []
        return made + [f"planted on purpose: {planted.line}" for planted in planted_in(item.spec, metrics)]
    if item.kind == "mixture" and (shares := found.shares(item)):
        names = {other.path: other.name for other in found.items.values()}
        return [
            ", ".join(
                f"{names.get(path, path)} {share:.1%}"
                for path, share in sorted(shares.items(), key=lambda pair: -pair[1])
            )
        ]
    return []


def _data_lines(metrics: dict[str, Any]) -> Iterator[str]:
    train, held_out = metrics["train"], metrics.get("validation") or {}
    unit = "conversations" if "conversations" in train else "documents"
    read = metrics.get("read") or {}
    begin = f"{read['documents']:,} read, " if isinstance(read.get("documents"), int) else ""
    yield (
        f"{begin}{train.get(unit, 0):,} {unit} with {train.get('tokens', 0):,} tokens to train on,"
        f" {held_out.get(unit, 0):,} held out"
    )
    for title, group in (
        ("not read", "rejected"),
        ("filters dropped", "dropped"),
        ("personal data replaced", "replaced"),
    ):
        counts = metrics.get(group)
        if isinstance(counts, dict) and counts:
            order = [name for name in metrics.get("filters") or () if name in counts]
            named = [*order, *(name for name in counts if name not in order)]
            yield f"{title}: {', '.join(f'{name} {counts[name]:,}' for name in named)}"


class SourceRow(TypedDict):
    """A source, and its use in a lineage."""

    name: str
    digest: str
    license: str
    language: str
    files: int
    bytes: int
    used_for: list[str]  # names of the parts that read it
    tokens_held: int  # in the training splits of these parts
    tokens_trained_on: int


def sources_table(found: Lineage) -> Table:
    """A table of every source with its licence, its language and its tokens that were trained on."""
    counted = ("files", "size", "tokens held", "tokens trained on")
    headings = ("source", "licence", "language", *counted[:2], "used for", *counted[2:], "digest")
    table = empty_table("sources", headings, numbers=counted, folded=headings)
    for row in source_rows(found):
        numbers = (str(row["files"] or "-"), f"{amount(row['bytes'])}B" if row["bytes"] else "-")
        facts = (
            escape(row["name"]),
            escape(row["license"] or "not stated"),
            escape(row["language"] or "not stated"),
        )
        tokens = (amount(row["tokens_held"]), amount(row["tokens_trained_on"]))
        table.add_row(
            *facts, *numbers, escape(", ".join(row["used_for"])), *tokens, f"[dim]{row['digest'][:12]}[/]"
        )
    return table


def planted_table(found: Lineage) -> Table | None:
    """A table of the documents put into the training data on purpose; None if there are no such documents."""
    rows = {
        (item.path, planted.name): (item, planted)
        for item in found.items.values()
        for planted in planted_in(item.spec, item.metrics)
    }
    if not rows:
        return None
    headings = ("planted documents", "in", "copies of each", "documents", "copies", "tokens", "digest")
    table = empty_table("planted on purpose", headings, numbers=headings[3:6], folded=headings)
    for item, planted in rows.values():
        counts = (planted.documents, planted.copies, planted.tokens)
        table.add_row(
            *(escape(planted.name), escape(item.name), ", ".join(map(str, planted.buckets))),
            *("-" if count is None else f"{count:,}" for count in counts),
            f"[dim]{planted.digest[:12]}[/]",
        )
    return table


def source_rows(found: Lineage) -> list[SourceRow]:
    """The sources as plain values; tokens of a corpus count for the documents that it was made from."""
    trained = found.trained_on()
    rows: list[SourceRow] = []
    for key, documents in found.documents.items():
        users = {
            item.path: item
            for item in found.items.values()
            if any(link.key == key for link in item.inputs.values())
        }
        held = [
            item.metrics["train"].get("tokens", 0)
            for item in users.values()
            if isinstance(item.metrics.get("train"), dict)
        ]
        rows.append(
            {
                "name": documents.name,
                "digest": documents.digest,
                "license": str(documents.facts.get("license") or ""),
                "language": str(documents.facts.get("language") or ""),
                "files": documents.files,
                "bytes": documents.bytes,
                "used_for": [item.name for item in users.values()],
                "tokens_held": sum(held),
                "tokens_trained_on": round(sum(trained.get(path, 0.0) for path in users)),
            }
        )
    return rows


def file_rows(found: Lineage) -> list[dict[str, Any]]:
    """Every source file with its size and SHA-256, by source; `files` is None where they were not
    recorded."""
    return [
        {"name": one.name, "digest": one.digest, "files": _files(found.store, one.digest)}
        for one in found.documents.values()
    ]


def _files(store: Store, digest: str) -> list[dict[str, Any]] | None:
    rows = recorded_files(store, digest)
    return None if rows is None else [row.model_dump() for row in rows]


def to_json(found: Lineage, root: str, *, files: bool = False) -> dict[str, Any]:
    """A part as JSON for programs, with its inputs nested inside."""
    item = found.items[root]
    inputs: dict[str, Any] = {}
    for role, link in item.inputs.items():
        documents = found.documents.get(link.key)
        if documents is None:
            inputs[role] = to_json(found, link.key, files=files) | {"step": link.step}
            continue
        inputs[role] = {
            "name": documents.name,
            "kind": "external",
            "fingerprint": documents.digest,
            "source": documents.facts,
        }
        if files:
            inputs[role]["files"] = _files(found.store, documents.digest)
    return {
        "name": item.name,
        "kind": item.kind,
        "fingerprint": item.fingerprint,
        "path": item.path if item.manifest or item.action in ("reuse", "resume", "stored") else None,
        "action": item.action,
        "created": item.manifest.created if item.manifest else None,
        "spec": item.spec,
        "metrics": item.metrics or None,
        "inputs": inputs,
    }
