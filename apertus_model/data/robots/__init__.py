"""Tells whether robots.txt has closed an address since it was fetched, by the list of domains or the
snapshots that a filter names."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from apertus_model.data.documents.addresses import Address
from apertus_model.data.robots.domains import ListedDomains
from apertus_model.data.robots.rules import Exclusion
from apertus_model.data.robots.snapshots import SnapshotRobots
from specs.robots import RobotsFilter


class Robots(Protocol):
    """A list of domains, or snapshots of robots.txt."""

    def excluded(self, address: Address) -> Exclusion | None:
        """Why an address is excluded, or None."""


def load(spec: RobotsFilter, scratch: Path) -> Robots:
    """Opens what a filter names once per process. SourceError when a file cannot be read or says nothing."""
    if spec.domains is not None:
        return ListedDomains.load(spec.domains, spec.agents)
    return SnapshotRobots.load(spec, scratch)
