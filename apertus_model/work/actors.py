"""Workers as actors of a Ray cluster: each keeps what units share, and is given the next unit when it has
committed one.

Losses are counted here, by unit: Ray's own retries of an actor give up as soon as its node is lost.

Invariants: no actor outlives its stage, since Ray ends the actors of a process that has ended. A unit
passes through Ray as its key, and comes back as nothing, or as the report of an error.
"""

import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import Generator
from typing import Any, NamedTuple

from apertus_model.progress import UnitProgress
from apertus_model.stop import StopSignal
from apertus_model.work.cluster import Stopped
from apertus_model.work.units import MOST_LOSSES, error_of, reported, run_share
from infra.ray_cluster import (
    PATIENCE_SECONDS,
    check_node,
    connection,
    lost_in_words,
    nodes_in_words,
    own_node,
    worker_needs,
)
from infra.store.scratch import temporary_folder
from specs.job import Failure, Job

LOOK_SECONDS = 1.0
END_SECONDS = 10.0
PASSED = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "PYTHONHASHSEED", "PYTHONPATH"),
    *("HF_HUB_OFFLINE", "APERTUS_CACHE"),
)
"""Variables of the stage that its workers have too."""


class UnitWorker:
    """An actor, on a node of the cluster."""

    def __init__(self, job: str) -> None:
        self._ends = contextlib.ExitStack()
        folder = self._ends.enter_context(temporary_folder("worker"))
        own = Job.model_validate_json(job).model_copy(update={"scratch": str(folder)})
        self._keys = deque[str]()
        self._committed = run_share(own, iter(self._keys.popleft, None))

    def ready(self) -> None:
        """Returns once the actor has a place."""

    def run(self, key: str) -> str | None:
        """Computes and commits a unit. The report of an error, as JSON, or None."""
        self._keys.append(key)
        try:
            next(self._committed)
        except Exception as error:
            return reported(error).model_dump_json()
        return None

    def end(self) -> None:
        """Removes what the worker has on its node."""
        self._ends.close()


def run_on_ray(
    job: Job, keys: list[str], stop: StopSignal, progress: UnitProgress
) -> Generator[str, None, None]:
    """Has units computed by actors, and yields the key of each when it is committed. No actor is left when
    the generator ends.

    Raises:
        StageError: a unit raised it, or the cluster cannot be used.
        WorkerLost: `MOST_LOSSES` workers ended with the same unit, or could not start one after the other.
        ClusterLost: the node of this process ended, or the head does not answer any more.
        Stopped: `stop` was requested.
    """
    if not keys:
        return
    with connection(job.profile.ray) as ray, stop.cooperating():
        actors = _Actors(ray, job, deque(keys))
        for _ in range(actors.wanted):
            actors.start()
        while actors.unfinished and not stop.requested:
            yield from actors.committed()
            progress.waiting(running=actors.running, queued=len(actors.asked) - actors.running)
        actors.end()
        if stop.requested:
            raise Stopped(f"stopped ({stop.reason}): {len(actors.asked)} workers were ended")


class _Asked(NamedTuple):
    """A worker, and the unit that it computes; None while it has no place yet."""

    actor: Any
    key: str | None


class _Actors:
    """The workers of a stage. `asked`: by the reference of the answer that is awaited of each."""

    def __init__(self, ray: Any, job: Job, keys: deque[str]) -> None:
        self._ray, self._keys = ray, keys
        self._needs = worker_needs(job.launch, job.profile, job.gpus)
        self.wanted = min(len(keys), job.launch.worker_count or job.profile.ray.most_workers)
        self.asked: dict[Any, _Asked] = {}
        self.running = 0  # of them, those that have a unit
        self._ending: list[Any] = []
        self._losses: Counter[str | None] = Counter()
        self._told = False
        self._begun = time.monotonic()
        variables = {name: os.environ[name] for name in PASSED if name in os.environ}
        cpus = self._needs.cpus
        variables |= {"RAYON_NUM_THREADS": f"{cpus:g}", "TOKENIZERS_PARALLELISM": str(cpus > 1).lower()}
        self._actor = ray.remote(UnitWorker).options(
            num_cpus=cpus,
            num_gpus=self._needs.gpus,
            memory=self._needs.memory or None,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": job.profile.environment | variables},
        )
        self._job = job.model_dump_json()
        self._node = own_node(ray)

    @property
    def unfinished(self) -> bool:
        """Whether a unit is left. Workers that still wait for a place then are not waited for."""
        return bool(self._keys or self.running)

    def start(self) -> None:
        actor = self._actor.remote(self._job)
        self.asked[actor.ready.remote()] = _Asked(actor, None)

    def committed(self) -> Generator[str, None, None]:
        """Waits a little. Yields the units that have been committed meanwhile, and hands out others."""
        answered, _ = self._ray.wait(list(self.asked), timeout=LOOK_SECONDS)
        for reference in answered:
            actor, key = self.asked.pop(reference)
            self.running -= key is not None
            failure = self._answer(reference)
            if failure is not None:
                self._lost(key, failure)
                continue
            self._hand_out(actor)
            if key is not None:
                self._losses.pop(None, None)
                yield key
        if not answered:
            self._look()

    def _hand_out(self, actor: Any) -> None:
        """Gives a worker the next unit, or ends it if no unit is left."""
        if self._keys:
            key = self._keys.popleft()
            self.asked[actor.run.remote(key)] = _Asked(actor, key)
            self.running += 1
        else:
            self._ending.append(actor.end.remote())

    def end(self) -> None:
        """Waits until those without work have removed what they have on their nodes."""
        self._ray.wait(self._ending, num_returns=len(self._ending), timeout=END_SECONDS)

    def _answer(self, reference: Any) -> Failure | None:
        try:
            report = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return Failure(message=lost_in_words(error), again=True)
        return None if report is None else Failure.model_validate_json(report)

    def _lost(self, key: str | None, failure: Failure) -> None:
        """Begins the unit of a worker again, with another worker. The error if that is of no use."""
        check_node(self._ray, self._node)  # all workers are lost with it
        self._losses[key] += 1
        if not failure.again or self._losses[key] == MOST_LOSSES:
            raise error_of(failure)
        if key is not None:
            self._keys.appendleft(key)
        print(f"{f'unit {key}' if key else 'a worker'} is begun again: {failure.message}", flush=True)
        self.start()

    def _look(self) -> None:
        """Raises ClusterLost if this process has lost its node; tells people what the workers wait for if
        none has a place."""
        check_node(self._ray, self._node)
        waited = time.monotonic() - self._begun > PATIENCE_SECONDS
        if waited and not self._told and not self.running:
            self._told = True
            print(
                f"no worker has a place yet; waiting for {self._needs}; {nodes_in_words(self._ray)}",
                flush=True,
            )
