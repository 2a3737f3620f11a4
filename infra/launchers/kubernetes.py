"""An attempt at a stage as an indexed Job of Kubernetes: a pod per node, one torchrun in each, through kubectl.

`manifests` are the objects: a ConfigMap with the job file, a headless Service by which the pods find the first of them, and the Job. There
is no shared folder: what the stage reports comes in the log of the first pod, in lines that begin with `REPORT`.

Deleting the Job ends the pods with SIGTERM and a grace period, in which a training stage commits a checkpoint; so does the cluster when it
drains a node. A pod that Kubernetes itself ended counts as ended by the cluster, and the attempt after it goes on from the last checkpoint.

Invariant: the objects of an attempt have names of its own, and are deleted when `run` is left.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.launchers.local import STOP_GRACE_SECONDS, TAIL_LINES, Ended, stage_environment
from infra.launchers.slurm import nodes_of
from specs.errors import StageError
from specs.job import REPORT, Job
from specs.launch import Launch
from specs.profile import KubernetesProfile, Profile
from specs.redaction import redacted

POLL_SECONDS = 5.0
PORT = 29500
FILES = "/job"
SCRATCH = "/scratch"
GRACE_SECONDS = 150
DISRUPTIONS = ("DisruptionTarget",)  # condition of pods that the cluster evicts, preempts or takes from a node that is gone


class KubernetesError(RuntimeError):
    """kubectl failed. Another attempt may succeed."""


class KubernetesJob:
    """One attempt.

    Raises:
        StageError: the processes cannot be divided among nodes, or the attempt needs a folder of this machine.
    """

    def __init__(self, job: Job, launch: Launch, profile: Profile, *, distributed: bool) -> None:
        assert profile.kubernetes is not None, "the profile is checked"
        if not re.match(r"[a-z0-9+]+://", job.store):
            raise StageError(
                f"the store {job.store} is a folder of this machine, which pods do not see. Fix: a store on object storage (--store)"
            )
        self.settings: KubernetesProfile = profile.kubernetes
        self.profile = profile
        self.launch = launch
        self.distributed = distributed
        self.nodes, self.per_node = nodes_of(launch, profile) if distributed else (1, 1)
        self.name = object_name(job.pipeline, job.node, job.attempt)
        self.scratch = Path(job.scratch)
        self.job = job
        self._stopped = ""
        self._lock = threading.Lock()
        self._created = False

    def manifests(self) -> list[dict[str, Any]]:
        """ConfigMap, Service and Job."""
        settings = self.settings
        labels = {**settings.labels, "app.kubernetes.io/name": "apertus", "apertus/attempt": self.name}
        about = {"name": self.name, "namespace": settings.namespace, "labels": labels}
        inside = self.job.model_copy(update={"scratch": SCRATCH, "progress": REPORT})
        resources: dict[str, str] = {key: value for key, value in (("cpu", settings.cpus), ("memory", settings.memory)) if value}
        if settings.gpu and (gpus := self.per_node if self.distributed else self.job.gpus):
            resources[settings.gpu] = str(gpus)
        volumes: list[dict[str, Any]] = [
            {"name": "job", "configMap": {"name": self.name}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
        ]
        mounts: list[dict[str, Any]] = [
            {"name": "job", "mountPath": FILES, "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ]
        for index, volume in enumerate(settings.volumes):
            volumes.append({"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume.claim}})
            mounts.append({"name": f"volume-{index}", "mountPath": volume.path})
        variables = {**self.profile.environment, **stage_environment(self.launch), "APERTUS_STOP_FILE": f"{SCRATCH}/stop"}
        container: dict[str, Any] = {
            "name": "stage",
            "image": settings.image,
            "command": self.command(),
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "envFrom": [{"secretRef": {"name": secret}} for secret in settings.secrets],
            "resources": {"requests": resources, "limits": resources},
            "volumeMounts": mounts,
        }
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "subdomain": self.name,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "nodeSelector": settings.node_selector,
            "tolerations": settings.tolerations,
            "containers": [container],
            "volumes": volumes,
        }
        if settings.service_account is not None:
            pod["serviceAccountName"] = settings.service_account
        job = {
            "completions": self.nodes,
            "parallelism": self.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # the next attempt has to go on from another checkpoint
            "ttlSecondsAfterFinished": 24 * 3600,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        if self.launch.time_limit is not None:
            job["activeDeadlineSeconds"] = int(self.launch.time_limit.seconds) + GRACE_SECONDS
        return [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"job.json": inside.model_dump_json(indent=1)}},
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
        """Of every pod. Kubernetes fills in the index of the pod."""
        python = self.profile.python or "python"
        module = ["-m", "apertus_model.stages", f"{FILES}/job.json"]
        if not self.distributed:
            return [python, *module]
        return [
            *(python, "-m", "torch.distributed.run", f"--nnodes={self.nodes}", f"--nproc-per-node={self.per_node}"),
            *(
                "--node-rank=$(JOB_COMPLETION_INDEX)",
                "--max-restarts=0",
                f"--master-addr={self.name}-0.{self.name}",
                f"--master-port={PORT}",
            ),
            *module,
        ]

    def run(
        self,
        on_line: Callable[[str], None],
        on_progress: Callable[[dict[str, Any]], None],
        on_start: Callable[[int], None] = lambda pipe: None,
    ) -> Ended:
        """Creates the objects and blocks until the Job is over. KubernetesError when the cluster refuses them."""
        with self._lock:
            if self._stopped:
                return Ended(-15, self._stopped, (), None)
            self._kubectl("apply", "--filename=-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": self.manifests()}))
            self._created = True
        on_line(f"created the Job {self.name}: {self.nodes} pods, {self.per_node} processes in each")
        reader = LogReader(on_line, on_progress, self.scratch / "log.txt")
        try:
            condition = self._wait(reader)
            requeue = "" if self._stopped or condition == "Complete" else self._disruption()
        finally:
            self._delete()
        return Ended(0 if condition == "Complete" else 1, self._stopped, tuple(reader.tail), reader.error, requeue)

    def stop(self, reason: str) -> None:
        """Deletes the Job: its pods have `GRACE_SECONDS` to commit and end."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = reason
            created = self._created
        if created:
            self._kubectl("delete", "job", self.name, "--wait=false", "--cascade=foreground", "--ignore-not-found", check=False)

    def _wait(self, reader: LogReader) -> str:
        """Follows the log of the first pod until the Job has a final condition; which."""
        begun = time.monotonic()
        told = 0.0
        follower: threading.Thread | None = None
        while True:
            document = self._get("job", self.name)
            final = next((c["type"] for c in _conditions(document) if c["type"] in ("Complete", "Failed") and c["status"] == "True"), "")
            if follower is None and (final or self._first_pod_runs()):
                follower = threading.Thread(target=self._follow, args=(reader,), daemon=True)
                follower.start()
            if final or document is None:
                if follower is not None:
                    follower.join(STOP_GRACE_SECONDS)
                return final or "Deleted"
            if (limit := self.launch.time_limit) and time.monotonic() - begun > limit.seconds:
                self.stop(f"the time limit of {limit} is over")
            if self._stopped:
                told = told or time.monotonic()
                if time.monotonic() - told > GRACE_SECONDS + STOP_GRACE_SECONDS:
                    return "Deleted"
            time.sleep(POLL_SECONDS)

    def _pods(self) -> list[dict[str, Any]]:
        listing = json.loads(self._kubectl("get", "pods", f"--selector=apertus/attempt={self.name}", "--output=json", check=False) or "{}")
        pods: list[dict[str, Any]] = listing.get("items", [])
        return pods

    def _first_pod_runs(self) -> bool:
        phases = {
            pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index"): pod.get("status", {}).get("phase")
            for pod in self._pods()
        }
        return phases.get("0") in ("Running", "Succeeded", "Failed")

    def _disruption(self) -> str:
        """Why the cluster ended a pod; empty when it was the stage itself."""
        for pod in self._pods():
            for condition in _conditions(pod):
                if condition["type"] in DISRUPTIONS and condition["status"] == "True":
                    return f"pod {pod['metadata']['name']}: {condition.get('reason', 'disrupted')}"
        return ""

    def _follow(self, reader: LogReader) -> None:
        first = next(
            pod["metadata"]["name"]
            for pod in self._pods()
            if pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index") == "0"
        )
        with subprocess.Popen(
            [*self._prefix(), "logs", "--follow", first], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as logs:
            assert logs.stdout is not None
            for line in logs.stdout:
                reader.line(line.rstrip("\n"))

    def _get(self, kind: str, name: str) -> dict[str, Any] | None:
        text = self._kubectl("get", kind, name, "--output=json", "--ignore-not-found", check=False)
        document: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return document

    def _delete(self) -> None:
        for kind in ("job", "service", "configmap"):
            self._kubectl("delete", kind, self.name, "--ignore-not-found", "--wait=false", check=False)

    def _prefix(self) -> list[str]:
        context = [f"--context={self.settings.context}"] if self.settings.context else []
        return ["kubectl", *context, f"--namespace={self.settings.namespace}"]

    def _kubectl(self, *words: str, text: str | None = None, check: bool = True) -> str:
        try:
            done = subprocess.run([*self._prefix(), *words], input=text, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise StageError("this machine has no 'kubectl'. Fix: install it, or use a profile with another launcher") from error
        if done.returncode and check:
            raise KubernetesError(f"kubectl {words[0]}: {done.stderr.strip()}")
        if done.returncode:
            print(f"kubectl {words[0]}: {done.stderr.strip()}", file=sys.stderr, flush=True)
        return done.stdout


class LogReader:
    """Takes the reports out of a log: rows of progress and the error go their own ways, all else is lines."""

    def __init__(self, on_line: Callable[[str], None], on_progress: Callable[[dict[str, Any]], None], log: Path) -> None:
        self._on_line = on_line
        self._on_progress = on_progress
        self._log = log
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.error: dict[str, Any] | None = None

    def line(self, text: str) -> None:
        text = redacted(text)
        if text.startswith(REPORT):
            report = json.loads(text.removeprefix(REPORT))
            if "error" in report:
                self.error = report["error"]
            else:
                self._on_progress(report)
            return
        with open(self._log, "a", encoding="utf-8") as log:
            log.write(text + "\n")
        self.tail.append(text)
        self._on_line(text)


def object_name(pipeline: str, node: str, attempt: str) -> str:
    """A name that Kubernetes takes, and that no other attempt has: at most 52 characters, so that those of pods fit."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{pipeline}-{node}".lower()).strip("-")
    ending = re.sub(r"[^a-z0-9]", "", attempt.lower())[-14:]
    return f"a-{words[:35].strip('-')}-{ending}"


def _conditions(document: dict[str, Any] | None) -> list[dict[str, Any]]:
    conditions: list[dict[str, Any]] = (document or {}).get("status", {}).get("conditions") or []
    return conditions
