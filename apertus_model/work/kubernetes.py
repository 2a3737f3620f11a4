"""Workers as pods of Indexed Jobs of Kubernetes, through kubectl.

Kubernetes itself replaces a pod that the cluster evicts or preempts, under the same index. It does not
replace a pod that fails, whose remaining units are submitted again with those of others.

Invariants: the Jobs of a stage have names of their own, and are deleted when the stage ends. A pod reads its
work from the store, and reports there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from infra.kubernetes import (
    INDEX,
    POLL_SECONDS,
    SCRATCH,
    Kubectl,
    KubernetesError,
    object_name,
    pod_spec,
    settings_of,
)
from specs.job import Job
from specs.launch import Workers

LABEL = "apertus/workers"
MOST = 10_000  # the most pods of a Job
LOG_LINES = 20
OVER = ("SUCCEEDED", "FAILED", "gone")


class IndexedJobs:
    """The Jobs of a stage: see `apertus_model.work.cluster.ClusterJobs`.

    Raises:
        StageError: pods cannot do the work.
    """

    def __init__(self, job: Job) -> None:
        self.MOST, self.POLL_SECONDS = MOST, POLL_SECONDS
        self.settings = settings_of(job.profile, job)
        self.name = object_name(job.pipeline, job.node, job.attempt)
        self._job = job
        self._workers = job.launch.workers or Workers()
        self._kubectl = Kubectl(self.settings)
        self._sizes: dict[str, int] = {}  # pods of each Job, by number
        self._trouble = ""
        self.cpus = self._workers.cpus or 1

    def manifest(self, number: int, shares: str, workers: int) -> dict[str, Any]:
        """The manifest of Job `number`."""
        job, stated, settings = self._job, self._workers, self.settings
        labels = {**settings.labels, "app.kubernetes.io/name": "apertus", LABEL: self.name}
        python = job.profile.python or "python"
        module = ["-m", "apertus_model.work.worker", job.store, shares, "$(JOB_COMPLETION_INDEX)"]
        cpus = str(stated.cpus) if stated.cpus is not None else settings.cpus if job.gpus else "1"
        memory = stated.memory or (settings.memory if job.gpus else None)
        pod = pod_spec(
            job.profile,
            "worker",
            [python, *module],
            {"APERTUS_SCRATCH": SCRATCH},
            cpus=cpus,
            memory=memory,
            gpus=job.gpus,
        )
        if stated.time_limit is not None:
            pod["activeDeadlineSeconds"] = int(stated.time_limit.seconds)
        spec = {
            "completions": workers,
            "parallelism": min(workers, stated.count or workers),
            "completionMode": "Indexed",
            "backoffLimitPerIndex": 0,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    }
                ]
            },
            "ttlSecondsAfterFinished": 24 * 3600,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        about = {"name": self._name(str(number)), "namespace": settings.namespace, "labels": labels}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec}

    def submit(self, number: int, shares: str, workers: int) -> None:
        """Submits Job `number`. KubernetesError when the cluster refuses it."""
        self._sizes[str(number)] = workers
        self._kubectl.apply([self.manifest(number, shares, workers)])

    def states(self) -> dict[str, str] | None:
        try:
            items = self._kubectl.items("jobs,pods", LABEL, self.name)
        except (KubernetesError, ValueError) as error:
            if self._trouble != (trouble := str(error)):
                self._trouble = trouble
                print(f"{error}; trying again", flush=True)
            return None
        numbers = {self._name(number): number for number in self._sizes}
        of_workers: dict[str, str] = {}
        jobs = {item["metadata"]["name"]: item for item in items if item["kind"] == "Job"}
        for name in jobs.keys() & numbers.keys():
            number, status = numbers[name], jobs[name].get("status", {})
            of_workers |= {f"{number}-{index}": "PENDING" for index in range(self._sizes[number])}
            for field, state in (("completedIndexes", "SUCCEEDED"), ("failedIndexes", "FAILED")):
                of_workers |= {f"{number}-{index}": state for index in _indexes(status.get(field, ""))}
        for pod in (item for item in items if item["kind"] == "Pod"):
            about = pod["metadata"]
            worker = f"{numbers.get(about['labels'].get('job-name', ''))}-{about['annotations'].get(INDEX)}"
            if of_workers.get(worker) == "PENDING" and pod["status"].get("phase") == "Running":
                of_workers[worker] = "RUNNING"
        return of_workers

    def over(self, worker: str, state: str) -> bool:
        return state in OVER  # object storage shows at once what was written

    def explanation(self, worker: str, state: str) -> str:
        number, _, index = worker.partition("-")
        name = self._name(number)
        lost = f"pod {index} of the Job {name} ({state}) ended before its units were committed"
        selector = f"--selector=job-name={name},{INDEX}={index}"
        log = self._kubectl("logs", selector, f"--tail={LOG_LINES}", check=False).strip()
        return f"{lost}; its log ends:\n{log or '(empty)'}"

    def end(self, *, finished: bool) -> str:
        for number in self._sizes:
            self._kubectl.delete("job", self._name(number))
        return f"the Jobs {', '.join(map(self._name, self._sizes))}"

    def _name(self, number: str) -> str:
        return f"{self.name}-{number}"


def _indexes(text: str) -> Iterator[int]:
    """Yields the indexes in a list of ranges: 0, 2, 3, 4 for `0,2-4`."""
    for span in filter(None, text.split(",")):
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1)
