"""A Ray cluster on nodes of one machine: `ray start` on each, with a token and a temporary folder of its own.

The head has no CPUs, the others have one each. A node that is cut off is noticed within half a minute, not
after one as usual.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from infra.ray_cluster import QUIET
from tests.e2e.conftest import command_line
from tests.e2e.nodes import Nodes
from tests.e2e.prefect_server import ROOT

HEAD = 1
ADDRESS = f"10.77.0.{HEAD}:6379"
CLIENT = f"ray://10.77.0.{HEAD}:10001"
START_SECONDS = 150.0
TRIES = 3
TEMPORARY = Path("/tmp/ray")
SETTINGS = QUIET | {
    "RAY_AUTH_MODE": "token",
    "RAY_kill_child_processes_on_worker_exit": "0",  # as in infra/kuberay/raycluster.yaml
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "4",
}
OURS = ("apertus_model", "torch.distributed.run", "flows.", "ray::UnitWorker", "ray::NodeProcess")


class RayNodes:
    """`workers`: the nodes beside the head. Other nodes have no Ray."""

    def __init__(self, nodes: Nodes, folder: Path, workers: Iterable[int]) -> None:
        self.nodes = nodes
        self.workers = tuple(workers)
        self._folder = folder
        folder.mkdir(parents=True)
        token = folder / "token"
        token.write_text("a-token-for-tests-of-forty-characters-----")
        self.environment = SETTINGS | {"RAY_AUTH_TOKEN_PATH": str(token)}

    def on(self, node: int, *words: str) -> list[str]:
        """The command that runs another on a node, with the temporary folder of its Ray."""
        own = self._folder / f"node{node}"
        own.mkdir(exist_ok=True)
        TEMPORARY.mkdir(exist_ok=True)
        return self.nodes.on(node, "sh", "-c", 'mount --bind "$0" /tmp/ray && exec "$@"', str(own), *words)

    def scratch(self, node: int) -> Path:
        return self._folder / f"scratch{node}"

    def start(self, *nodes: int, **settings: str) -> None:
        """Starts Ray on nodes, at the same time, and waits for it. On a busy machine a raylet gives up, since
        its agents need more than the 15 s that it waits for them: it is started again."""
        for _ in range(TRIES):
            starts = {node: self._started(node, settings) for node in nodes}
            said = {node: start.communicate(timeout=START_SECONDS)[0] for node, start in starts.items()}
            nodes = tuple(node for node, start in starts.items() if start.returncode != 0)
            if not nodes:
                return
            for node in nodes:
                self.nodes.kill(node)
        raise AssertionError("\n".join(f"node{node}: {said[node]}" for node in nodes))

    def _started(self, node: int, settings: dict[str, str]) -> subprocess.Popen[str]:
        ray = str(Path(sys.executable).parent / "ray")
        head = ("--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false")
        role = head if node == HEAD else (f"--address={ADDRESS}", "--num-cpus=1")
        own = (f"--node-ip-address=10.77.0.{node}", "--object-store-memory=100000000")
        return subprocess.Popen(
            self.on(node, ray, "start", *own, *role),
            cwd=ROOT,
            env=os.environ | self.environment | {"APERTUS_SCRATCH": str(self.scratch(node))} | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def mend(self) -> None:
        """Starts what has ended, on the head's end everything."""
        alive = {node for node in (HEAD, *self.workers) if self.raylet(node)}
        if HEAD not in alive or not self.pids(HEAD, "gcs_server"):
            for node in (HEAD, *self.workers):
                self.nodes.kill(node)
            (self._folder / f"node{HEAD}" / "ray_current_cluster").unlink(missing_ok=True)
            self.start(HEAD)
            alive = {HEAD}
        if ended := [node for node in self.workers if node not in alive]:
            for node in ended:
                self.nodes.kill(node)
            self.start(*ended)

    def pids(self, node: int, program: str) -> list[int]:
        """The processes of a node that run a program of Ray."""
        return [
            pid
            for pid in self.nodes.processes(node)
            if Path(command_line(pid).split("\0")[0]).name.startswith(program)
        ]

    def raylet(self, node: int) -> list[int]:
        return self.pids(node, "raylet")

    def ours(self, node: int) -> dict[int, str]:
        """The processes of a node that are not Ray's own."""
        shown = {pid: command_line(pid).replace("\0", " ") for pid in self.nodes.processes(node)}
        return {pid: words for pid, words in shown.items() if any(name in words for name in OURS)}

    def nothing_is_left(self, within: float) -> bool:
        deadline = time.monotonic() + within
        while any(map(self.ours, self.nodes.numbers)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True
