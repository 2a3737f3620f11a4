"""Traces what an artifact was made from, from the store alone.

Invariant: no recipe is needed: `identity.json` of every artifact names its inputs by their place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from infra.store.documents import Identity, InputRecord, Manifest
from infra.store.reading.artifact import Artifact
from infra.store.reading.walk import reach
from infra.store.store import Store, StoreError


@dataclass(frozen=True)
class Ancestor:
    """One artifact of a lineage. `manifest` is None if a checkpoint was read before its stage had ended."""

    path: str
    step: int | None
    identity: Identity
    manifest: Manifest | None

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def kind(self) -> str:
        return self.identity.kind

    @property
    def recorded(self) -> dict[str, Any]:
        """The resolved spec as the manifest records it; empty without a manifest."""
        return self.manifest.execution.spec if self.manifest else {}

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec: what was hashed, and around it what was only recorded."""
        return {**self.recorded, **self.identity.spec}

    @property
    def inputs(self) -> dict[str, InputRecord]:
        return self.identity.inputs

    def source(self, role: str) -> dict[str, Any]:
        """The recorded facts about the documents of an input: url, format, language, license, if stated."""
        spec = {**self.identity.spec, **self.recorded}
        kind, _, index = role.partition(":")
        field = "personas" if kind == "personas" else "source"
        named = spec.get("planted", {}).get(index) if kind == "planted" else spec.get(field)
        if (
            named is None
            and isinstance(spec.get("sources"), list)
            and index.isdecimal()
            and int(index) < len(spec["sources"])
        ):
            named = spec["sources"][int(index)]
        if isinstance(named, dict):
            return dict(named)
        return {name: spec[name] for name in ("url", "language", "license") if spec.get(name)}

    @property
    def steps(self) -> int:
        """Optimizer steps of this part up to the step that was read; 0 for a part that does not train."""
        if self.step is not None and "global_batch_size" in self.spec:
            return self.step - int(self.spec.get("start_step", 0))
        return 0

    @property
    def tokens(self) -> int:
        """The tokens that `steps` consumed."""
        return _tokens_at(self.spec, self.step) if self.step is not None else 0

    @property
    def metrics(self) -> dict[str, Any]:
        return self.manifest.metrics if self.manifest else {}


Counts = Callable[[str, InputRecord], bool]
"""A function that says whether an input is followed, by its role."""


def of_weights(role: str, ref: InputRecord) -> bool:
    """Whether the weights began as an input's: a parent, or a checkpoint merged or exported."""
    return ref.step is not None and role.split(":")[0] in ("parent", "checkpoint", "base")


def lineage(
    store: Store, path: str, step: int | None = None, counts: Counts = lambda role, ref: True
) -> list[Ancestor]:
    """An artifact and all that it was made from, through the inputs that count, inputs first. `step`: that of
    a checkpoint. StoreError when a part of the lineage is gone."""
    identities, reached = _ancestry(store, path, step, counts)

    def manifest(place: str, at: int | None) -> Manifest | None:
        try:
            return Artifact(store, place, at).manifest
        except StoreError:
            return None

    ordered = (
        (place, at)
        for place, steps in reached.items()
        for at in sorted(steps, key=lambda at: -1 if at is None else at)
    )
    return [Ancestor(place, at, identities[place], manifest(place, at)) for place, at in ordered]


def tokens_before(store: Store, path: str) -> int:
    """The tokens that the lineage of a part had trained on when the part began; the most, if it was made from
    several checkpoints. StoreError when a part of the lineage is gone."""
    identities, reached = _ancestry(store, path, None, of_weights)
    tokens = dict.fromkeys(reached, 0)
    for place in reached:
        for role, ref in identities[place].inputs.items():
            if ref.place is not None and ref.step is not None and of_weights(role, ref):
                own = _tokens_at(identities[ref.place].spec, ref.step)
                tokens[place] = max(tokens[place], tokens[ref.place] + own)
    return tokens[path]


def _tokens_at(spec: Mapping[str, Any], step: int) -> int:
    """The tokens that a part itself has consumed at a step."""
    if "global_batch_size" not in spec:
        return 0
    steps = step - int(spec.get("start_step", 0))
    return steps * int(spec["global_batch_size"]) * int(spec["sequence_length"])


def _ancestry(
    store: Store, path: str, step: int | None, counts: Counts
) -> tuple[dict[str, Identity], dict[str, set[int | None]]]:
    """Identities of an artifact and its ancestry, and the steps at which each is read, inputs first."""
    identities: dict[str, Identity] = {}

    def inputs_of(place: str) -> list[tuple[str, int | None]]:
        if place not in identities:
            identities[place] = Artifact(store, place).identity
        return [
            (ref.place, ref.step)
            for role, ref in identities[place].inputs.items()
            if ref.place is not None and counts(role, ref)
        ]

    reached = reach(inputs_of, [(path, step)])
    seen: set[str] = set()
    for place in reached:
        if any(parent not in seen for parent, _ in inputs_of(place)):
            problem = "it names itself, or what was made from it, as an input"
            raise store.damaged(f"{place}/identity.json", problem)
        seen.add(place)
    return identities, reached
