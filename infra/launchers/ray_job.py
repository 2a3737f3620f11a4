"""An attempt at a stage on nodes of a Ray cluster: an actor on each starts the same torchrun as on one
machine, and holds the write end of its standard input.

What the processes of a node print goes into a file there, which the actor reads: to a stage that is told to
stop because its launcher is gone, a pipe without a reader would be an error before it has committed.

Invariants: when this process ends, however it ends, Ray ends its actors, and with them ends the standard
input of the stage, which commits and ends. No actor is left when `run` is. The launcher never judges success.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from infra.launchers.cluster import ClusterJob, nodes_of
from infra.launchers.local import END_SECONDS, Ended, stacks_of, stage_environment
from infra.launchers.log_reader import LogReader
from infra.liveness import ROOT
from infra.ray_cluster import PATIENCE_SECONDS, Needs, connection, living_nodes, nodes_in_words
from infra.store.scratch import temporary_folder
from specs.job import REPORT, Job, ProgressRow
from specs.launch import Launch
from specs.profiles import Profile

LOOK_SECONDS = 0.5
NODE_ID = "ray.io/node-id"


class Place(NamedTuple):
    """A node of the cluster."""

    address: str
    name: str  # Ray's id of it
    port: int  # that was free when it was asked


class NodeProcess:
    """An actor that has the processes of a stage on its node."""

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._folder = self._ends.enter_context(temporary_folder("stage"))
        self._log = self._folder / "log.txt"
        self._place = 0  # in the log, up to which it was read
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> Place:
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return Place(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), port)

    def start(self, job: str, program: list[str], environment: dict[str, str]) -> None:
        """Starts the stage. `program`: the interpreter, if not that of the actor, and its arguments without
        the file of the job."""
        inside = Job.model_validate_json(job).model_copy(
            update={"scratch": str(self._folder), "progress": REPORT}
        )
        file = self._folder / "job.json"
        file.write_text(inside.model_dump_json(indent=1))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [program[0] or sys.executable, *program[1:], str(file)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "PYTHONPATH": path},
                start_new_session=True,
            )

    def look(self) -> tuple[list[str], int | None]:
        """The whole lines that were printed since the last look, and the exit code once all are read."""
        assert self._process is not None, "start is called first"
        code = self._process.poll()
        with open(self._log, "rb") as log:
            log.seek(self._place)
            text = log.read()
        if code is None:
            text = text[: text.rfind(b"\n") + 1]
        self._place += len(text)
        lines = text.decode("utf-8", "replace").splitlines()
        return (lines if code is None else [*lines, *stacks_of(self._folder)]), code

    def stop(self) -> None:
        """Tells the stage to commit and to end."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self) -> None:
        """Kills what is left of the stage, and removes its folder."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._ends.close()


def stage_needs(launch: Launch, profile: Profile, gpus: int, *, distributed: bool, in_units: bool) -> Needs:
    """What a stage asks of the cluster. `gpus`: of the model that a stage of one process holds, or that each
    of its workers holds, of which there are by default as many as a node has room for."""
    nodes, cpus, workers = 1, 1, 1
    if distributed:
        nodes, gpus = nodes_of(launch, profile)
        cpus = launch.cpu_threads * gpus
    elif in_units and gpus:
        workers = launch.workers_of_node(profile.gpus_per_node, gpus)
    held = gpus * workers if profile.ray.gpus else 0
    return Needs(profile.ray.cpus_per_node or cpus, held, nodes=nodes)


class RayJob(ClusterJob):
    """An attempt that runs on nodes of a Ray cluster.

    Args:
        in_units: whether workers of the stage, on its node, share its units.
        exclude: ids of nodes that failed before.
    """

    def __init__(
        self,
        job: Job,
        launch: Launch,
        profile: Profile,
        *,
        distributed: bool,
        in_units: bool = False,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(job, launch, profile, distributed=distributed)
        self.exclude = list(exclude)
        self.needs = stage_needs(launch, profile, job.gpus, distributed=distributed, in_units=in_units)

    def program(self, node: int, first: Place) -> list[str]:
        """The command of a node without the file of the job."""
        python = self.profile.python or ""
        ranks = self.torchrun(str(node), first.address, str(first.port)) if self.distributed else []
        return [python, *ranks, "-m", "apertus_model.stages"]

    def run(
        self,
        on_line: Callable[[str], None],
        on_progress: Callable[[ProgressRow], None],
        on_start: Callable[[int], None] = lambda pipe: None,
    ) -> Ended:
        """Places the stage and blocks until it is over. StageError where the cluster cannot be used."""
        reader = LogReader(on_line, on_progress, self.scratch / "log.txt")
        with connection(self.profile.ray) as ray:
            from ray.util.placement_group import remove_placement_group

            group = self._group(ray, on_line)
            actors: list[Any] = []
            try:
                if not self._placed(ray, group, on_line):
                    return Ended(-signal.SIGTERM, self._stopped, (), None)
                actors = [self._actor(ray, group, number) for number in range(self.nodes)]
                return self._follow(ray, actors, reader)
            finally:
                ray.wait(
                    [actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_SECONDS
                )
                for actor in actors:
                    ray.kill(actor)
                remove_placement_group(group)

    def _group(self, ray: Any, on_line: Callable[[str], None]) -> Any:
        """Asks for a bundle of resources on each of as many nodes, without those that failed before, if there
        are others."""
        from ray.util.placement_group import placement_group

        there = {node["NodeID"] for node in living_nodes(ray)}
        avoided = there & {*self.exclude}
        if avoided and len(there - avoided) < self.nodes:
            on_line(f"nodes that failed before are used again: {', '.join(sorted(avoided))}")
            avoided = set()
        selector = {NODE_ID: f"!in({','.join(sorted(avoided))})"}
        return placement_group(
            [self.needs.resources] * self.nodes,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[selector] * self.nodes if avoided else None,
        )

    def _placed(self, ray: Any, group: Any, on_line: Callable[[str], None]) -> bool:
        """Waits for the nodes. False if the attempt is told to stop meanwhile."""
        ready, since, told = group.ready(), time.monotonic(), False
        while not ray.wait([ready], timeout=LOOK_SECONDS)[0]:
            if self._stopped:
                return False
            self._keep_to_limit(waits=True)
            if not told and time.monotonic() - since > PATIENCE_SECONDS:
                told = True
                on_line(f"waiting for {self.needs}; {nodes_in_words(ray)}")
        return not self._stopped

    def _actor(self, ray: Any, group: Any, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return (
            ray.remote(NodeProcess)
            .options(num_cpus=self.needs.cpus, num_gpus=self.needs.gpus, scheduling_strategy=place)
            .remote()
        )

    def _follow(self, ray: Any, actors: list[Any], reader: LogReader) -> Ended:
        """Starts the stage on all nodes, passes on what it prints, and waits for its end."""
        places: list[Place] = []
        codes: dict[int, int] = {}
        told, first_end, number = False, 0.0, 0
        variables = stage_environment(self.launch, self.stop_seconds) | self.profile.environment
        try:
            for actor in actors:
                number = len(places)
                places.append(ray.get(actor.place.remote()))
            for number, actor in enumerate(actors):
                program = self.program(number, places[0])
                ray.get(actor.start.remote(self.job.model_dump_json(), program, variables))
            reader.line(
                f"on {', '.join(place.address for place in places)}: {self.per_node} processes on each"
            )
            while len(codes) < len(actors):
                for number, actor in enumerate(actors):
                    if number in codes:
                        continue
                    lines, code = ray.get(actor.look.remote())
                    for line in lines:
                        reader.line(line)
                    if code is not None:
                        codes[number], first_end = code, first_end or time.monotonic()
                self._keep_to_limit()
                if self._stopped and not told:
                    told = True
                    ray.get([actor.stop.remote() for actor in actors])
                alone = first_end and time.monotonic() - first_end > self.grace
                if self._overdue or alone:
                    break  # `run` kills the rest
                time.sleep(LOOK_SECONDS)
        except ray.exceptions.RayError as error:
            lost = places[number].address if number < len(places) else f"number {number}"
            why = f"node {lost} was lost: {type(error).__name__}"
            dead = tuple(place.name for place in places[number : number + 1])
            return Ended(1, self._stopped, tuple(reader.tail), reader.error, why, dead)
        code = next((code for code in codes.values() if code), 0 if len(codes) == len(actors) else 1)
        interrupted = reader.error is not None and reader.error.interrupted and not self._stopped
        why = reader.error.message if interrupted and reader.error is not None else ""
        return Ended(code, self._stopped, tuple(reader.tail), reader.error, why)
