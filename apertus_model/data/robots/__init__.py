"""Tells whether robots.txt has closed an address since it was fetched, by the list of domains or the
snapshots that a filter names."""

from pathlib import Path

from apertus_model.data.robots.domains import ListedDomains, load_domains
from apertus_model.data.robots.snapshots import SnapshotRobots, load_snapshots
from specs.robots import RobotsFilter

Robots = ListedDomains | SnapshotRobots


def load(spec: RobotsFilter, scratch: Path) -> Robots:
    """Opens what a filter names once per process. SourceError when a file cannot be read or says nothing."""
    if spec.domains is not None:
        return load_domains(spec.domains, tuple(spec.agents))
    return load_snapshots(spec.model_dump_json(), scratch)
