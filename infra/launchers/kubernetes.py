"""An attempt at a stage as an indexed Job of Kubernetes: a pod per node, one torchrun in each, through
kubectl.

`manifests` returns the objects: a ConfigMap with the job file, a headless Service by which the pods find the
first pod, and the Job. There is no shared folder: what the stage reports comes in the log of the first pod,
in lines that begin with `REPORT`.

Deleting the Job ends the pods with SIGTERM and a grace period, in which a training stage commits a
checkpoint; so does the cluster when it drains a node. A pod that Kubernetes itself ended counts as ended by
the cluster, and the attempt after it resumes from the last checkpoint.

Invariants: the objects of an attempt have names that no other attempt uses, and are deleted when `run` is
left. A Job is gone when the cluster says so: a kubectl that fails says nothing about the Job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from infra.kubernetes import (
    INDEX,
    POLL_SECONDS,
    SCRATCH,
    Kubectl,
    KubernetesError,
    conditions,
    object_name,
    pod_spec,
    settings_of,
)
from infra.launchers.cluster import ClusterJob
from infra.launchers.local import END_SECONDS, Ended, stage_environment
from infra.launchers.pod_log import Follower, LogReader
from specs.job import REPORT, Job, ProgressRow
from specs.launch import Launch
from specs.profiles import Profile

PORT = 29500
FILES = "/job"
# condition of pods that the cluster evicts, preempts or takes from a node that is gone
DISRUPTIONS = ("DisruptionTarget",)


class KubernetesJob(ClusterJob):
    """An attempt that runs as a Job of Kubernetes. `workers`: the number of workers of a stage that is one
    process, each with the GPUs of a whole model.

    Raises:
        StageError: the attempt needs a folder of this machine.
    """

    def __init__(
        self, job: Job, launch: Launch, profile: Profile, *, distributed: bool, workers: int = 1
    ) -> None:
        self.settings = settings_of(profile, job)
        super().__init__(job, launch, profile, distributed=distributed)
        self.name = object_name(job.pipeline, job.node, job.attempt)
        self._gpus = self.per_node if distributed else job.gpus * workers
        self._kubectl = Kubectl(self.settings)

    def manifests(self) -> list[dict[str, Any]]:
        """The ConfigMap, the Service and the Job."""
        settings = self.settings
        labels = {**settings.labels, "app.kubernetes.io/name": "apertus", "apertus/attempt": self.name}
        about = {"name": self.name, "namespace": settings.namespace, "labels": labels}
        inside = self.job.model_copy(update={"scratch": SCRATCH, "progress": REPORT})
        variables = {
            **stage_environment(self.launch, self.stop_seconds),
            "APERTUS_STOP_FILE": f"{SCRATCH}/stop",
        }
        pod = pod_spec(
            self.profile,
            "stage",
            self.command(),
            variables,
            cpus=settings.cpus,
            memory=settings.memory,
            gpus=self._gpus,
        )
        pod |= {"subdomain": self.name, "terminationGracePeriodSeconds": math.ceil(self.grace)}
        pod["volumes"].append({"name": "job", "configMap": {"name": self.name}})
        mount = {"name": "job", "mountPath": FILES, "readOnly": True}
        pod["containers"][0]["volumeMounts"].append(mount)
        # the deadline of the pod: that of the Job would count the time that it waits for nodes
        if self.launch.time_limit is not None:
            pod["activeDeadlineSeconds"] = math.ceil(self.launch.time_limit.seconds + self.grace)
        job = {
            "completions": self.nodes,
            "parallelism": self.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # the next attempt has to resume from another checkpoint
            "ttlSecondsAfterFinished": 24 * 3600,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": about,
                "data": {"job.json": inside.model_dump_json(indent=1)},
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": about,
                "spec": {
                    "clusterIP": "None",
                    "selector": {"apertus/attempt": self.name},
                    "ports": [{"port": PORT}],
                    "publishNotReadyAddresses": True,
                },
            },
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": job},
        ]

    def command(self) -> list[str]:
        """The command of every pod. Kubernetes fills in the index of the pod."""
        python = self.profile.python or "python"
        module = ["-m", "apertus_model.stages", f"{FILES}/job.json"]
        if not self.distributed:
            return [python, *module]
        first = f"{self.name}-0.{self.name}"
        return [python, *self.torchrun("$(JOB_COMPLETION_INDEX)", first, str(PORT)), *module]

    def run(
        self,
        on_line: Callable[[str], None],
        on_progress: Callable[[ProgressRow], None],
        on_start: Callable[[int], None] = lambda pipe: None,
    ) -> Ended:
        """Creates the objects and blocks until the Job is over. KubernetesError when the cluster refuses
        them."""
        with self._lock:
            if self._stopped:
                return Ended(-15, self._stopped, (), None)
        reader = LogReader(on_line, on_progress, self.scratch / "log.txt")
        follower = Follower([*self._kubectl.prefix, "logs"], reader, POLL_SECONDS)
        try:
            self._kubectl.apply(self.manifests())
            on_line(f"created the Job {self.name}: {self.nodes} pods, {self.per_node} processes in each")
            condition, disruption = self._wait(on_line, follower)
        finally:
            follower.end(END_SECONDS)
            self._delete()
        requeue = "" if self._stopped or condition == "Complete" else disruption
        return Ended(
            0 if condition == "Complete" else 1, self._stopped, tuple(reader.tail), reader.error, requeue
        )

    def _wait(self, on_line: Callable[[str], None], follower: Follower) -> tuple[str, str]:
        """Blocks until the Job has a final condition, or is gone. Returns that condition (`Deleted` for a Job
        that is gone), and why the cluster ended one of its pods, if it did.

        A Job that was told to stop is deleted: its pods have `grace` to commit and end."""
        deleted, disruption, trouble = False, "", ""
        while True:
            try:
                if self._stopped and not deleted:
                    self._kubectl(
                        "delete",
                        "job",
                        self.name,
                        "--wait=false",
                        "--cascade=foreground",
                        "--ignore-not-found",
                    )
                    deleted = True
                job, pods = self._look()
            except (KubernetesError, ValueError) as error:  # no answer, or a torn one: the Job runs on
                if trouble != (trouble := str(error)):
                    on_line(f"{error}; trying again")
            else:
                trouble = ""
                final = next(
                    (
                        c["type"]
                        for c in conditions(job)
                        if c["type"] in ("Complete", "Failed") and c["status"] == "True"
                    ),
                    "",
                )
                phases = {index: pod["status"].get("phase") for index, pod in pods.items()}
                disruption = disruption or _disruption(pods)
                if phases.get("0") in ("Running", "Succeeded", "Failed"):
                    follower.begin(pods["0"]["metadata"]["name"])
                if final or job is None:
                    return final or "Deleted", disruption
                self._keep_to_limit(waits=len(phases) < self.nodes or "Pending" in phases.values())
            if self._stopped and time.monotonic() - self._stopped_at > self.grace + END_SECONDS:
                return "Deleted", disruption
            time.sleep(POLL_SECONDS)

    def _look(self) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
        """The Job (None when it is gone) and its pods by their index. KubernetesError when the cluster does
        not answer."""
        items = self._kubectl.items("jobs,pods", "apertus/attempt", self.name)
        pods = {
            item["metadata"].get("annotations", {}).get(INDEX): item
            for item in items
            if item["kind"] == "Pod"
        }
        return next((item for item in items if item["kind"] == "Job"), None), pods

    def _delete(self) -> None:
        for kind in ("job", "service", "configmap"):
            self._kubectl.delete(kind, self.name)


def _disruption(pods: dict[str, dict[str, Any]]) -> str:
    """Why the cluster ended a pod; empty when it ended none."""
    for pod in pods.values():
        for condition in conditions(pod):
            if condition["type"] in DISRUPTIONS and condition["status"] == "True":
                return f"pod {pod['metadata']['name']}: {condition.get('reason', 'disrupted')}"
    return ""
