"""A Ray cluster of this machine, whose nodes are processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra import ray_cluster


@contextlib.contextmanager
def little_ray(nodes: int = 1, cpus: int = 2) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` of so many nodes with as many CPUs each."""
    from ray.cluster_utils import Cluster

    os.environ |= ray_cluster.QUIET
    node = {"num_cpus": cpus, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()


def actors(title: str) -> list[int]:
    """The processes of the actors of a class on this machine."""
    return [
        int(file.parent.name)
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if file.exists() and file.read_bytes().startswith(f"ray::{title}".encode())
    ]
