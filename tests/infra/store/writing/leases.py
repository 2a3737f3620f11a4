"""Leases of one part, claimed by a clock that moves when told."""

from __future__ import annotations

from typing import Any

from infra.store import Store
from infra.store.documents import to_json
from infra.store.writing.lease import Holder, Lease, Leases, Timing

PART = f"corpus/{'f' * 32}"
FIRST = f"{PART}/leases/00000001.json"


class Clock:
    """An observer's own clock, in seconds, which moves when told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def timing(clock: Clock | None = None, **values: Any) -> Timing:
    clock = clock or Clock()
    return Timing(**{"seconds": 60.0, "clock": clock, "sleep": clock.sleep} | values)


def claim(store: Store, name: str, clock: Clock | None = None) -> Lease | None:
    leases = Leases(store, PART, timing(clock))
    seen = leases.look()
    return leases.claim(name, seen) if seen.free else None


def held(store: Store, name: str = "first") -> Lease:
    lease = claim(store, name)
    assert lease is not None
    return lease


def elsewhere(store: Store, name: str = "far", generation: int = 1, **facts: Any) -> Lease:
    """A lease that a process of another machine has claimed."""
    holder = Holder.here(name, 60.0).model_copy(
        update={"boot": "another-boot", "host": "far.example", "pid": 1} | facts
    )
    store.write_once(f"{PART}/leases/{generation:08d}.json", to_json(holder.model_dump()))
    return Lease(store, PART, generation, holder, timing())
