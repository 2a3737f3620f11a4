"""An attempt at a stage on nodes of a Ray cluster: an actor on each starts the same torchrun as on one
machine, and holds the write end of its standard input.

What the processes of a node print goes into a file there, which the actor reads: to a stage that is told to
stop because its launcher is gone, a pipe without a reader would be an error before it has committed. Rows of
progress and the error of the stage are in files beside it, as on one machine.

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
from infra.launchers.local import (
    END_SECONDS,
    HUNG,
    TORCHRUN_ERROR,
    Ended,
    GrowingFile,
    error_of,
    stacks_of,
    stage_environment,
    start_process,
)
from infra.liveness import python_path
from infra.ray_cluster import (
    PATIENCE_SECONDS,
    ClusterNeeds,
    check_node,
    connection,
    lost_in_words,
    nodes_in_words,
    own_node,
)
from infra.store.scratch import temporary_folder
from specs.job import ERROR, Failure, Job
from specs.launch import Launch
from specs.profiles import Profile

LOOK_SECONDS = 0.5
NODE_ID = "ray.io/node-id"


class Place(NamedTuple):
    """A node of the cluster."""

    address: str
    name: str
    port: int  # that was free when it was asked


def name_of(address: str, node: str) -> str:
    """The name of a node for people. `node`: Ray's id of it, since another one may have its address later."""
    return f"{address} ({node[:8]})"


class News(NamedTuple):
    """What came from a node since the last look. `code`: the exit code, once everything has come; `error`:
    why the stage has no result, as JSON of a `Failure`."""

    lines: list[str]
    rows: list[str]  # of progress
    code: int | None
    error: str = ""


class NodeProcess:
    """An actor that has the processes of a stage on its node."""

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._folder = self._ends.enter_context(temporary_folder("stage"))
        self._log = GrowingFile(self._folder / "log.txt")
        self._progress = GrowingFile(self._folder / "progress.jsonl")
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> Place:
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address = ray.util.get_node_ip_address()
        return Place(address, name_of(address, own_node(ray)), port)

    def start(self, job: str, program: list[str], environment: dict[str, str]) -> News:
        """Starts the stage, and looks. `program`: the interpreter, if not that of the actor, and its
        arguments without the file of the job."""
        inside = Job.model_validate_json(job).model_copy(
            update={"scratch": str(self._folder), "progress": str(self._folder / "progress.jsonl")}
        )
        file = self._folder / "job.json"
        file.write_text(inside.model_dump_json(indent=1))
        own = {"PYTHONPATH": python_path(), "TORCHELASTIC_ERROR_FILE": str(self._folder / TORCHRUN_ERROR)}
        with open(self._folder / "log.txt", "wb") as log:
            command = [program[0] or sys.executable, *program[1:], str(file)]
            self._process = start_process(command, os.environ | environment | own, log)
        return self.look()

    def look(self) -> News:
        assert self._process is not None, "start is called first"
        code = self._process.poll()
        ended = code is not None
        lines, rows = self._log.lines(last=ended), self._progress.lines(last=ended)
        if code is None:
            return News(lines, rows, None)
        stacks = stacks_of(self._folder)
        error = error_of(self._folder, code) or (Failure(message=HUNG, again=True) if stacks else None)
        return News([*lines, *stacks], rows, code, "" if error is None else error.model_dump_json())

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


def stage_needs(
    launch: Launch, profile: Profile, gpus: int, *, distributed: bool, in_units: bool
) -> ClusterNeeds:
    """What a stage asks of the cluster. `gpus`: of the model that a stage of one process holds, or that each
    of its workers holds, of which there are by default as many as a node has room for."""
    nodes, cpus, workers = 1, 1, 1
    if distributed:
        nodes, gpus = nodes_of(launch, profile)
        cpus = launch.cpu_threads * gpus
    elif in_units and gpus:
        workers = launch.workers_of_node(profile.gpus_per_node, gpus)
    held = gpus * workers if profile.ray.gpus else 0
    return ClusterNeeds(profile.ray.cpus_per_node or cpus, held, nodes=nodes)


class RayJob(ClusterJob):
    """An attempt that runs on nodes of a Ray cluster.

    Args:
        in_units: whether workers of the stage, on its node, share its units.
        exclude: names of nodes that failed before.
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
        self._error: Failure | None = None
        self.needs = stage_needs(launch, profile, job.gpus, distributed=distributed, in_units=in_units)

    def program(self, node: int, first: Place) -> list[str]:
        """The command of a node without the file of the job."""
        python = self.profile.python or ""
        ranks = self.torchrun(str(node), first.address, str(first.port)) if self.distributed else []
        return [python, *ranks, "-m", "apertus_model.stages"]

    def run(self, on_line: Callable[[str], None]) -> Ended:
        """Places the stage and blocks until it is over, in the main thread. Its rows of progress are appended
        to the file of the job, and its error is written to the scratch folder. StageError where the cluster
        cannot be used, ClusterLost when it is lost."""
        with connection(self.profile.ray, log_to_driver=False) as ray:
            from ray.util.placement_group import remove_placement_group

            group = self._group(ray, on_line)
            actors: list[Any] = []
            try:
                if not self._placed(ray, group, on_line):
                    return Ended(-signal.SIGTERM, self._stopped, (), None)
                actors = [self._actor(ray, group, number) for number in range(self.nodes)]
                return self._follow(_Nodes(ray, actors), on_line)
            finally:
                ray.wait(
                    [actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_SECONDS
                )
                for actor in actors:
                    ray.kill(actor)
                remove_placement_group(group)

    def _group(self, ray: Any, on_line: Callable[[str], None]) -> Any:
        """Asks for a bundle of resources on each of as many nodes, without those that failed before, if
        enough others have the resources."""
        from ray.util.placement_group import placement_group

        ids = {
            name_of(node["NodeManagerAddress"], node["NodeID"]): node["NodeID"]
            for node in self.needs.fitting(ray)
        }
        avoided = ids.keys() & {*self.exclude}
        if avoided and len(ids) - len(avoided) < self.nodes:
            on_line(f"nodes that failed before are used again: {', '.join(sorted(avoided))}")
            avoided = set()
        selector = {NODE_ID: f"!in({','.join(ids[name] for name in sorted(avoided))})"}
        return placement_group(
            [self.needs.resources] * self.nodes,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[selector] * self.nodes if avoided else None,
        )

    def _placed(self, ray: Any, group: Any, on_line: Callable[[str], None]) -> bool:
        """Waits for the nodes. False if the attempt is told to stop meanwhile."""
        own, ready, since, told = own_node(ray), group.ready(), time.monotonic(), False
        while not ray.wait([ready], timeout=LOOK_SECONDS)[0]:
            if self._stopped:
                return False
            check_node(ray, own)
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

    def _follow(self, nodes: _Nodes, on_line: Callable[[str], None]) -> Ended:
        """Starts the stage on all nodes, passes on what it prints, and waits for its end."""
        places: dict[int, Place] = {}
        codes: dict[int, int] = {}
        told, first_end = False, 0.0
        variables = stage_environment(self.launch, self.stop_seconds) | self.profile.environment
        try:
            for number in range(self.nodes):
                nodes.ask(number, "place")
            while len(places) < self.nodes:
                if self._stopped:
                    return Ended(-signal.SIGTERM, self._stopped, (), None)
                places |= nodes.answers()
            for number in range(self.nodes):
                program = self.program(number, places[0])
                nodes.ask(number, "start", self.job.model_dump_json(), program, variables)
            where = ", ".join(places[number].address for number in range(self.nodes))
            on_line(f"on {where}: {self.per_node} processes on each")
            while len(codes) < self.nodes:
                for number, news in nodes.answers().items():
                    self._pass_on(news, on_line)
                    if news.code is None:
                        nodes.ask(number, "look")
                    else:
                        codes[number], first_end = news.code, first_end or time.monotonic()
                self._keep_to_limit()
                if self._stopped and not told:
                    told = True
                    for actor in nodes.actors:
                        actor.stop.remote()
                alone = first_end and time.monotonic() - first_end > self.grace
                if self._overdue or alone:
                    break  # `run` kills the rest
                time.sleep(LOOK_SECONDS)
        except _NodeLost as lost:
            place = places.get(lost.number)
            why = f"node {place.address if place else lost.number} was lost: {lost.why}"
            return Ended(1, self._stopped, (), self._error, why, (place.name,) if place else ())
        code = next((code for code in codes.values() if code), 0 if len(codes) == self.nodes else 1)
        interrupted = self._error is not None and self._error.interrupted and not self._stopped
        why = self._error.message if interrupted and self._error is not None else ""
        return Ended(code, self._stopped, (), self._error, why)

    def _pass_on(self, news: News, on_line: Callable[[str], None]) -> None:
        """The first error counts: that of another node may be that it has lost this one."""
        for line in news.lines:
            on_line(line)
        with open(self.job.progress, "a", encoding="utf-8") as progress:
            progress.writelines(f"{row}\n" for row in news.rows)
        if news.error and self._error is None:
            self._error = Failure.model_validate_json(news.error)
            (self.scratch / ERROR).write_text(news.error)


class _NodeLost(Exception):
    def __init__(self, number: int, why: str) -> None:
        self.number, self.why = number, why


class _Nodes:
    """The actors of an attempt, and what is asked of them. Nobody waits for a node that does not answer."""

    def __init__(self, ray: Any, actors: list[Any]) -> None:
        self._ray = ray
        self._own = own_node(ray)
        self._asked: dict[Any, int] = {}  # the number of an actor, by the reference of its answer
        self.actors = actors

    def ask(self, number: int, method: str, *arguments: Any) -> None:
        self._asked[getattr(self.actors[number], method).remote(*arguments)] = number

    def answers(self) -> dict[int, Any]:
        """What was answered by now, by the number of the actor. _NodeLost or ClusterLost when it was lost."""
        answered, silent = self._ray.wait([*self._asked], num_returns=len(self._asked), timeout=LOOK_SECONDS)
        if silent:
            check_node(self._ray, self._own)
        return dict(map(self._answer, answered))

    def _answer(self, reference: Any) -> tuple[int, Any]:
        number = self._asked.pop(reference)
        try:
            return number, self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            check_node(self._ray, self._own)  # all actors are lost with it
            raise _NodeLost(number, lost_in_words(error)) from error
