"""A job of Kubernetes, and a kubectl that a test answers for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from infra.launchers.kubernetes import KubernetesJob
from specs.job import Job
from specs.launch import Launch
from specs.profiles import Profile
from tests.jobs import job_at

PROFILE = Profile.model_validate(
    {
        "launcher": "kubernetes",
        "gpus_per_node": 8,
        "environment": {"NCCL_DEBUG": "WARN"},
        "kubernetes": {
            "image": "apertus:1",
            "namespace": "training",
            "service_account": "trainer",
            "cpus": "96",
            "memory": "1000Gi",
            "secrets": ["store-keys"],
            "volumes": [{"claim": "cache", "path": "/cache"}],
            "labels": {"kueue.x-k8s.io/queue-name": "team"},
            "node_selector": {"pool": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
    }
)

KUBECTL = """#!{python} -IS
# NOT kubectl: remembers what was applied, and answers from files that the test writes.
import json, pathlib, sys
folder = pathlib.Path({folder!r})
words = [word for word in sys.argv[1:] if not word.startswith(("--namespace", "--context"))]
with open(folder / "calls.txt", "a") as calls: calls.write(" ".join(words) + "\\n")
calls = [call.split() for call in (folder / "calls.txt").read_text().splitlines()]
failures = folder / "failures.txt"
if failures.exists() and failures.read_text().startswith(words[0] + "\\n"):
    failures.write_text(failures.read_text().partition("\\n")[2])
    sys.exit("Unable to connect to the server: net/http: TLS handshake timeout")
if words[0] == "apply":
    if (folder / "refuse").exists(): sys.exit("admission webhook denied the request")
    (folder / "applied.json").write_text(sys.stdin.read())
elif words[0] == "logs":
    number = sum(call[0] == "logs" for call in calls)
    since = [word.partition("=")[2] for word in words if word.startswith("--since-time=")]
    since = since[0][:19] if since else ""  # the API has seconds
    text, cuts = (folder / "logs.txt").read_text(), json.loads((folder / "cuts.json").read_text())
    lines = text[: cuts[number - 1] if number <= len(cuts) else None].splitlines(keepends=True)
    print("".join(line for line in lines if line[:19] >= since), end="")
elif words[0] == "get":
    number = sum(call[0] == "get" for call in calls)
    looks = json.loads((folder / "looks.json").read_text())
    items = [] if (folder / "deleted").exists() else looks[min(number, len(looks)) - 1]
    print(json.dumps({{"items": items}}))
elif words[0] == "delete" and words[1] == "job":
    (folder / "deleted").touch()
"""


def a_job(folder: Path, store: str = "s3://bucket/store") -> Job:
    about = {"pipeline": "mini", "node": "pretrain/2", "scratch": str(folder)}
    return job_at("pretrain/f", store, folder, "20261121T120000-0a1b2c3d", **about)


def a_kubernetes_job(
    folder: Path, processes: int = 16, distributed: bool = True, **launch: Any
) -> KubernetesJob:
    return KubernetesJob(
        a_job(folder), Launch(processes=processes, threads=2, **launch), PROFILE, distributed=distributed
    )


def stamped(lines: list[str]) -> str:
    """A log as `kubectl logs --timestamps` prints it, two lines a second."""
    return "".join(
        f"2026-11-21T17:00:{n // 2:02d}.{n % 2 * 5}00000000Z {line}\n" for n, line in enumerate(lines)
    )


class Pretended:
    """A cluster of files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        program = folder / "bin" / "kubectl"
        program.write_text(KUBECTL.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)

    def say(
        self, *phases: str, ends: str = "", logs: str = "", cuts: list[int] | None = None, disrupted: str = ""
    ) -> None:
        """What kubectl answers: to every look the next phase of the pod, with the last one the condition
        in which the Job ends; to who asks for the log so many characters of it (`cuts`), then all."""
        reasons = [{"type": "DisruptionTarget", "status": "True", "reason": disrupted}] if disrupted else []
        looks = []
        for number, phase in enumerate(phases, 1):
            conditions = [{"type": ends, "status": "True"}] if ends and number == len(phases) else []
            pod = {
                "kind": "Pod",
                "metadata": {
                    "name": "pod-0",
                    "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
                },
                "status": {"phase": phase, "conditions": reasons},
            }
            looks.append([{"kind": "Job", "metadata": {}, "status": {"conditions": conditions}}, pod])
        (self.folder / "looks.json").write_text(json.dumps(looks))
        (self.folder / "logs.txt").write_text(logs)
        (self.folder / "cuts.json").write_text(json.dumps(cuts or []))

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls.txt").read_text().splitlines()
