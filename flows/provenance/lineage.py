"""Traces a part back to its source documents: the parts and sources that it was made from, and as JSON.

A lineage comes from a plan (also for parts that have not run yet), or from the store alone, for a reader who
has an exported model and no recipe.

Invariant: it only reads. Licence, language and settings of a part are as recorded when it was made.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from apertus_model.data.order.mixture_recipe import FILE, MixtureRecipe
from flows.planning.graph import Input
from flows.planning.plan import Plan
from flows.stored_part import SourceFiles, StoredPart, planned_part, planned_source
from infra.store import Artifact, Store, StoreError
from infra.store.inputs import recorded_files
from infra.store.reading import lineage as stored
from specs.planted import PlantedRecord, planted_in
from specs.stages import TRAINING

DATA = ("mixture", "conversations", "pairs")  # roles of what a part trains on
LOST = {"rejected": "not read", "dropped": "filters dropped", "replaced": "personal data replaced"}


@dataclass(frozen=True)
class Member:
    """A part in a lineage. `key`: its place and the step up to which it was read; `action`: what a plan would
    do with it, or `stored` or `gone` where there is no plan; `steps`, `tokens`: of training, up to `key`."""

    key: str
    part: StoredPart
    action: str
    steps: int
    tokens: int

    @property
    def sources(self) -> dict[str, str]:
        """The keys of its inputs, by role."""
        return {role: key_of(input_) for role, input_ in self.part.inputs.items()}

    @property
    def planted(self) -> list[PlantedRecord]:
        """The documents that it puts into the training data on purpose."""
        return planted_in(self.part.spec, self.part.results)

    @property
    def data(self) -> dict[str, Any]:
        """The counts of the training split of data; empty for other parts and before they are made."""
        train = self.part.results.get("train")
        return train if isinstance(train, dict) else {}


@dataclass(frozen=True)
class SourceUse:
    """A source in a lineage. `used_for`: the parts that read it; `tokens_held`: in their training splits."""

    source: SourceFiles
    used_for: list[str]
    tokens_held: int
    tokens_trained_on: int


@dataclass
class Lineage:
    """Parts and sources by key. `roots` are the parts that were asked for."""

    store: Store
    roots: list[str] = field(default_factory=list)
    parts: dict[str, Member] = field(default_factory=dict)
    sources: dict[str, SourceFiles] = field(default_factory=dict)

    def shares(self, mixture: Member) -> dict[str, float]:
        """The share of every corpus in the samples of a mixture, by key; empty until the mixture is made."""
        try:
            sources = Artifact(self.store, mixture.part.path).document(FILE, MixtureRecipe).sources
        except (StoreError, OSError):
            return {}
        total = sum(source.weight for source in sources)
        return {source.path: source.weight / total for source in sources}

    def trained_on(self) -> dict[str, float]:
        """The tokens of each corpus, by key, that trajectories trained on up to their furthest step here."""
        furthest: dict[str, Member] = {}
        for member in self.parts.values():
            path = member.part.path
            if member.part.kind in TRAINING and member.tokens >= furthest.get(path, member).tokens:
                furthest[path] = member
        tokens: defaultdict[str, float] = defaultdict(float)
        for member in furthest.values():
            for key, share in self._shares_of(member).items():
                tokens[key] += share * member.tokens
        return tokens

    def _shares_of(self, trained: Member) -> dict[str, float]:
        """The shares of what a part trains on, by key: those of its mixture, or 1 for its only data set."""
        data = [key for role, key in trained.sources.items() if role.split(":")[0] in DATA]
        if "mixture" in trained.sources:
            return self.shares(self.parts[trained.sources["mixture"]])
        return {data[0]: 1.0} if len(data) == 1 else {}

    def source_uses(self) -> list[SourceUse]:
        """Every source with its use; tokens of a corpus count for the documents that it was made from."""
        trained = self.trained_on()
        uses = []
        for key, source in self.sources.items():
            users = {
                member.part.path: member for member in self.parts.values() if key in member.sources.values()
            }
            names = [member.part.name for member in users.values()]
            held = sum(member.data.get("tokens", 0) for member in users.values())
            uses.append(SourceUse(source, names, held, round(sum(trained.get(path, 0.0) for path in users))))
        return uses

    def summary_lines(self, member: Member) -> list[str]:
        """A few lines about a finished part: counts, filters and planted documents; shares of a mixture."""
        if member.part.kind in ("corpus", "conversations"):
            planted = [f"planted on purpose: {record.line}" for record in member.planted]
            return [*_data_lines(member), *planted]
        if member.part.kind == "mixture" and (shares := self.shares(member)):
            names = {other.part.path: other.part.name for other in self.parts.values()}
            largest = sorted(shares.items(), key=lambda pair: -pair[1])
            return [", ".join(f"{names.get(path, path)} {share:.1%}" for path, share in largest)]
        return []

    def to_json(self, root: str, *, files: bool = False) -> dict[str, Any]:
        """A part as JSON for programs, with its inputs nested inside."""
        member = self.parts[root]
        part, inputs = member.part, dict[str, Any]()
        for role, input_ in part.inputs.items():
            source = self.sources.get(key_of(input_))
            if source is None:
                inputs[role] = self.to_json(key_of(input_), files=files) | {"step": input_.step}
                continue
            names = {"name": source.name, "kind": "external", "fingerprint": source.digest}
            inputs[role] = {**names, "source": source.facts}
            if files:
                rows = recorded_files(self.store, source.digest)
                inputs[role]["files"] = None if rows is None else [row.model_dump() for row in rows]
        there = part.manifest or member.action in ("reuse", "resume", "stored")
        return {
            "name": part.name,
            "kind": part.kind,
            "fingerprint": part.fingerprint,
            "path": part.path if there else None,
            "action": member.action,
            "created": part.manifest.created if part.manifest else None,
            "spec": part.spec,
            "metrics": part.results or None,
            "inputs": inputs,
        }


def key_of(input_: Input) -> str:
    return f"{input_.name} {input_.fingerprint}" if input_.place is None else _key(input_.place, input_.step)


def _key(path: str, step: int | None) -> str:
    return path if step is None else f"{path}@{step}"


def of_plan(plan: Plan, names: list[str]) -> Lineage:
    lineage = Lineage(plan.store)

    def visit(name: str, at: int | None) -> str:
        node = plan.graph.nodes[name]
        key = _key(node.path, at)
        if key in lineage.parts:
            return key
        for input_ in node.inputs.values():
            if input_.node is not None:
                visit(input_.node, input_.step)
            else:
                lineage.sources[key_of(input_)] = planned_source(plan, input_.name, input_.fingerprint)
        steps, tokens = (at - node.start_step, node.tokens_until(at)) if at is not None else (0, 0)
        part = planned_part(plan, node, [])
        lineage.parts[key] = Member(key, part, part.step.action, steps, tokens)
        return key

    lineage.roots = [visit(name, plan.graph.nodes[name].end_step) for name in names]
    return lineage


def of_store(store: Store, path: str, step: int | None) -> Lineage:
    """The lineage of a stored artifact. StoreError when a part of it is gone."""
    lineage = Lineage(store)
    for ancestor in stored.lineage(store, path, step):
        key = _key(ancestor.path, ancestor.step)
        part = StoredPart(Artifact(store, ancestor.path, ancestor.step), ancestor.name)
        for role, input_ in part.inputs.items():
            if input_.place is not None:
                continue
            rows = recorded_files(store, input_.fingerprint) or []
            facts, size = ancestor.source(role), sum(row.size for row in rows)
            if (before := lineage.sources.get(key_of(input_))) is not None:
                facts |= {name: value for name, value in before.facts.items() if value}
            source = SourceFiles(input_.name, input_.fingerprint, facts, len(rows), size)
            lineage.sources[key_of(input_)] = source
        action = "stored" if ancestor.manifest or ancestor.step is not None else "gone"
        lineage.parts[key] = Member(key, part, action, ancestor.steps, ancestor.tokens)
    lineage.roots.append(_key(path, step))
    return lineage


def _data_lines(member: Member) -> Iterator[str]:
    train, metrics = member.data, member.part.results
    if not train:
        return
    held_out, amounts = metrics.get("validation") or {}, metrics.get("read") or {}
    unit = "conversations" if "conversations" in train else "documents"
    begin = f"{amounts['documents']:,} read, " if isinstance(amounts.get("documents"), int) else ""
    trained = f"{train.get(unit, 0):,} {unit} with {train.get('tokens', 0):,} tokens to train on"
    yield f"{begin}{trained}, {held_out.get(unit, 0):,} held out"
    for group, title in LOST.items():
        counts = metrics.get(group)
        if isinstance(counts, dict) and counts:
            order = [name for name in metrics.get("filters") or () if name in counts]
            named = [*order, *(name for name in counts if name not in order)]
            yield f"{title}: {', '.join(f'{name} {counts[name]:,}' for name in named)}"
