"""The base class of attempts that run as jobs of a cluster: their nodes, and the time that their stages have.

Invariants: a job is told to stop once, and has `grace` to end before it is ended. The time that it waits in a
queue does not count as time of the stage.
"""

import time
from pathlib import Path

from infra.launchers.local import END_SECONDS, LimitedAttempt, stop_seconds
from specs.errors import StageError
from specs.job import Job
from specs.launch import Launch
from specs.profiles import Profile
from specs.units import Duration


class ClusterJob(LimitedAttempt):
    """An attempt that runs as a job of a cluster. `announced`: how long before its end the job is told of it.

    Raises:
        StageError: the processes cannot be divided among nodes.
    """

    def __init__(
        self,
        job: Job,
        launch: Launch,
        profile: Profile,
        *,
        distributed: bool,
        announced: Duration | None = None,
    ) -> None:
        super().__init__(job, launch, distributed=distributed)
        self.profile = profile
        self.scratch = Path(job.scratch)
        self.nodes, self.per_node = nodes_of(launch, profile) if distributed else (1, 1)
        self.stop_seconds = stop_seconds(launch, announced)
        self.grace = self.stop_seconds + END_SECONDS

    def torchrun(self, node: str, address: str, port: str) -> list[str]:
        """The module that starts the ranks of a node, with its arguments; `node` is the number of the node.

        The rendezvous is static: with a dynamic one, torchrun asks the first node again and again, and on a
        node that is cut off it waits a quarter of an hour for the answer.
        """
        return [
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.per_node}",
            f"--node-rank={node}",
            f"--master-addr={address}",
            f"--master-port={port}",
            "--max-restarts=0",
        ]

    @property
    def _overdue(self) -> bool:
        return bool(self._stopped) and time.monotonic() - self._stopped_at > self.grace


def nodes_of(launch: Launch, profile: Profile) -> tuple[int, int]:
    """(nodes, processes on each). StageError when the nodes cannot share the processes evenly."""
    processes, most = launch.world_size, profile.gpus_per_node
    nodes = -(-processes // most)
    if processes % nodes:
        uneven = f"launch.processes is {processes}, which {nodes} nodes of {most} GPUs cannot share evenly"
        raise StageError(f"{uneven}. Fix: use a multiple of {most}, or fewer")
    return nodes, processes // nodes
