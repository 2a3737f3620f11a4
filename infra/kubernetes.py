"""Creates, watches and deletes Kubernetes objects through kubectl.

Everything that runs on Kubernetes is a Job whose pods `pod_spec` describes: the attempt at a stage
(`infra.launchers.kubernetes`), the workers of a stage (`apertus_model.work.kubernetes`).

Invariant: a kubectl that fails says nothing about the objects; an object is gone when the cluster says so.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from specs.errors import StageError
from specs.job import Job
from specs.profiles import KubernetesProfile, Profile

POLL_SECONDS = 5.0
ANSWER_SECONDS = 120.0  # of a command
SCRATCH = "/scratch"
INDEX = "batch.kubernetes.io/job-completion-index"


class KubernetesError(RuntimeError):
    """kubectl failed. Another attempt may succeed."""


def settings_of(profile: Profile, job: Job) -> KubernetesProfile:
    """The Kubernetes settings of a profile. StageError when pods cannot do the work of the job."""
    if profile.kubernetes is None:
        raise StageError(
            "pods need an image, which no profile states. Fix: run with --profile FILE that has kubernetes:"
            " {image: ...}"
        )
    if not re.match(r"[a-z0-9+]+://", job.store):
        raise StageError(
            f"the store {job.store} is a folder of this machine, which pods do not see. Fix: use a store on"
            " object storage (--store)"
        )
    return profile.kubernetes


class Kubectl:
    """The kubectl commands of one namespace."""

    def __init__(self, settings: KubernetesProfile) -> None:
        context = [f"--context={settings.context}"] if settings.context else []
        self.prefix = ["kubectl", *context, f"--namespace={settings.namespace}"]

    def __call__(self, *words: str, text: str | None = None, check: bool = True) -> str:
        """The output of a command. KubernetesError when it fails, or does not end within `ANSWER_SECONDS`;
        without `check`, its error is only printed."""
        try:
            done = subprocess.run(
                [*self.prefix, *words],
                input=text,
                capture_output=True,
                text=True,
                check=False,
                timeout=ANSWER_SECONDS,
            )
        except subprocess.TimeoutExpired:
            message = f"no answer for {ANSWER_SECONDS:g} s"
            done = subprocess.CompletedProcess(words, 1, "", message)
        except FileNotFoundError as error:
            raise StageError(
                "this machine has no 'kubectl'. Fix: install it, or use a profile with another launcher"
            ) from error
        if done.returncode and check:
            raise KubernetesError(f"kubectl {words[0]}: {done.stderr.strip()}")
        if done.returncode:
            print(f"kubectl {words[0]}: {done.stderr.strip()}", file=sys.stderr, flush=True)
        return done.stdout

    def apply(self, manifests: list[dict[str, Any]]) -> None:
        """Creates objects."""
        self(
            "apply",
            "--filename=-",
            text=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}),
        )

    def items(self, kinds: str, label: str, value: str) -> list[dict[str, Any]]:
        """The objects with a label. ValueError for an answer that is torn."""
        text = self("get", kinds, f"--selector={label}={value}", "--output=json")
        items: list[dict[str, Any]] = json.loads(text)["items"] if text.strip() else []
        return items

    def delete(self, kind: str, name: str) -> None:
        self("delete", kind, name, "--ignore-not-found", "--wait=false", check=False)


def pod_spec(
    profile: Profile,
    name: str,
    command: list[str],
    variables: Mapping[str, str],
    *,
    cpus: str | None,
    memory: str | None,
    gpus: int,
) -> dict[str, Any]:
    """A pod of one container, with a scratch folder, shared memory, and what the profile states."""
    settings = profile.kubernetes
    assert settings is not None, "the profile is checked"
    resources = {key: value for key, value in (("cpu", cpus), ("memory", memory)) if value}
    if settings.gpu and gpus:
        resources[settings.gpu] = str(gpus)
    volumes: list[dict[str, Any]] = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "scratch", "mountPath": SCRATCH},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for index, volume in enumerate(settings.volumes):
        volumes.append({"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume.claim}})
        mounts.append({"name": f"volume-{index}", "mountPath": volume.path})
    container: dict[str, Any] = {
        "name": name,
        "image": settings.image,
        "command": command,
        "env": [{"name": key, "value": value} for key, value in {**profile.environment, **variables}.items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in settings.secrets],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": mounts,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "nodeSelector": settings.node_selector,
        "tolerations": settings.tolerations,
        "containers": [container],
        "volumes": volumes,
    }
    if settings.service_account is not None:
        pod["serviceAccountName"] = settings.service_account
    return pod


def object_name(pipeline: str, node: str, attempt: str) -> str:
    """A name that Kubernetes accepts, and that no other attempt has: at most 52 characters, so that the names
    of pods fit."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{pipeline}-{node}".lower()).strip("-")
    tail = re.sub(r"[^a-z0-9]", "", attempt.lower())[-14:]
    return f"a-{words[: 49 - len(tail)].strip('-')}-{tail}"


def conditions(document: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The conditions that an object has now."""
    listed: list[dict[str, Any]] = (document or {}).get("status", {}).get("conditions") or []
    return listed
