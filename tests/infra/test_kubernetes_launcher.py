"""Attempts as Jobs of Kubernetes: the objects against the published schema, what becomes of them against a pretended kubectl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from apertus_model.progress import Progress
from infra.launchers import kubernetes as launcher
from infra.launchers import launch_job
from infra.launchers.kubernetes import KubernetesError, KubernetesJob, object_name
from specs.errors import StageError
from specs.job import REPORT, Job
from specs.launch import Launch
from specs.profile import Profile
from specs.units import Duration

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


def _job(folder: Path, store: str = "s3://bucket/store") -> Job:
    return Job(
        pipeline="mini", node="pretrain/2", kind="pretrain", version=1, fingerprint="f", spec={}, identity={}, inputs={},
        launch={}, store=store, path="pretrain/f", attempt="20261121T120000-0a1b2c3d", scratch=str(folder),
        progress=str(folder / "progress.jsonl"),
    )  # fmt: skip


def _kubernetes(folder: Path, processes: int = 16, distributed: bool = True, **launch: Any) -> KubernetesJob:
    return KubernetesJob(_job(folder), Launch(processes=processes, threads=2, **launch), PROFILE, distributed=distributed)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_every_object_is_valid_by_the_published_schema(tmp_path: Path, version: str, distributed: bool) -> None:
    manifests = _kubernetes(tmp_path, distributed=distributed, time_limit=Duration(3600)).manifests()
    assert [document["kind"] for document in manifests] == ["ConfigMap", "Service", "Job"]
    for document in manifests:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_would_notice_a_mistake(tmp_path: Path) -> None:
    job = _kubernetes(tmp_path).manifests()[2]
    job["spec"]["completionmode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_a_pod_per_node_finds_the_first_one(tmp_path: Path) -> None:
    attempt = _kubernetes(tmp_path)
    files, service, job = attempt.manifests()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"], spec["backoffLimit"]) == (2, 2, "Indexed", 0)
    container = pod["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    name = attempt.name
    assert {"--nnodes=2", "--nproc-per-node=8", "--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={name}-0.{name}"} <= set(
        container["command"]
    )
    assert pod["subdomain"] == service["metadata"]["name"] == name
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    inside = Job.model_validate_json(files["data"]["job.json"])
    assert (inside.progress, inside.scratch, inside.store) == (REPORT, "/scratch", "s3://bucket/store")


@pytest.mark.parametrize(
    ("kind", "spec", "gpus"),
    [
        ("completions", {}, "4"),
        ("harness", {}, "4"),
        ("rewards", {"reward": {"model": "s3://bucket/judge"}}, "1"),
        ("rewards", {"reward": {"model": None}}, None),
        ("corpus", {}, None),
    ],
)
def test_a_part_of_one_process_has_the_gpus_that_it_uses_on_one_node(
    tmp_path: Path, kind: str, spec: dict[str, Any], gpus: str | None
) -> None:
    launch = {"processes": 16, "parallel": {"tp": 4}}
    job = _job(tmp_path).model_copy(update={"kind": kind, "spec": spec, "launch": launch})
    attempt = launch_job(job, Launch.model_validate(launch), PROFILE, distributed=False)
    assert isinstance(attempt, KubernetesJob) == (gpus is not None)  # what uses no GPU stays where the launcher is
    described = KubernetesJob(job, Launch.model_validate(launch), PROFILE, distributed=False).manifests()[2]["spec"]
    assert described["completions"] == 1
    assert described["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") == gpus


def test_secrets_are_named_and_never_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-7f3a")
    manifests = _kubernetes(tmp_path).manifests()
    assert manifests[2]["spec"]["template"]["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "store-keys"}}]
    assert "planted-7f3a" not in json.dumps(manifests)


def test_a_store_on_this_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"which pods do not see. Fix: a store on object storage"):
        launch_job(_job(tmp_path, store=str(tmp_path)), Launch(processes=1, threads=1), PROFILE, distributed=True)


@pytest.mark.parametrize(("pipeline", "node"), [("mini", "pretrain/2"), ("UPPER_case.yaml", "a" * 80), ("x", "-")])
def test_names_are_what_kubernetes_takes(pipeline: str, node: str) -> None:
    name = object_name(pipeline, node, "20261121T120000-0a1b2c3d")
    assert len(name) <= 52 and name[0].isalpha() and name[-1].isalnum()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name != object_name(pipeline, node, "20261121T120000-0a1b2c3e")


# What becomes of it

KUBECTL = """#!{python}
# NOT kubectl: remembers what was applied, and answers from files that the test writes.
import json, pathlib, sys, time
folder = pathlib.Path({folder!r})
words = [word for word in sys.argv[1:] if not word.startswith(("--namespace", "--context"))]
with open(folder / "calls.txt", "a") as calls: calls.write(" ".join(words) + "\\n")
if words[0] == "apply":
    if (folder / "refuse").exists(): sys.exit("admission webhook denied the request")
    (folder / "applied.json").write_text(sys.stdin.read())
elif words[0] == "logs":
    print((folder / "logs.txt").read_text(), end="")
elif words[0] == "get":
    if words[1] == "pods": print((folder / "pods.json").read_text())
    elif not (folder / "deleted").exists(): print((folder / "job.json").read_text())
elif words[0] == "delete" and words[1] == "job":
    (folder / "deleted").touch()
"""


class Pretended:
    """A cluster of files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        program = folder / "bin" / "kubectl"
        program.write_text(KUBECTL.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)

    def say(self, *, conditions: list[dict[str, str]], logs: str = "", disrupted: str = "") -> None:
        """What kubectl answers from now on."""
        (self.folder / "job.json").write_text(json.dumps({"status": {"conditions": conditions}}))
        (self.folder / "logs.txt").write_text(logs)
        reasons = [{"type": "DisruptionTarget", "status": "True", "reason": disrupted}] if disrupted else []
        pod = {
            "metadata": {"name": "pod-0", "annotations": {"batch.kubernetes.io/job-completion-index": "0"}},
            "status": {"phase": "Running", "conditions": reasons},
        }
        (self.folder / "pods.json").write_text(json.dumps({"items": [pod]}))

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls.txt").read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    pretended = Pretended(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{pretended.folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.05)
    return pretended


def test_lines_rows_and_errors_come_out_of_the_log(cluster: Pretended, tmp_path: Path) -> None:
    rows = {"done": 1, "total": 2, "unit": "steps", "metrics": {}}
    report = {"error": {"message": "no", "again": False}}
    logs = f"first\n{REPORT}{json.dumps(rows)}\n{REPORT}{json.dumps(report)}\nlast\n"
    cluster.say(conditions=[{"type": "Failed", "status": "True"}], logs=logs)
    lines: list[str] = []
    told: list[dict[str, Any]] = []
    ended = _kubernetes(tmp_path).run(lines.append, told.append)
    assert (ended.code, ended.error, ended.requeue, told) == (1, report["error"], "", [rows])
    assert lines[1:] == ["first", "last"] and (tmp_path / "log.txt").read_text() == "first\nlast\n"
    assert [call.split()[1] for call in cluster.calls if call.startswith("delete")] == ["job", "service", "configmap"]
    applied = json.loads((cluster.folder / "applied.json").read_text())
    assert [item["kind"] for item in applied["items"]] == ["ConfigMap", "Service", "Job"]


def test_a_pod_that_the_cluster_evicts_is_no_failure_of_the_stage(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say(conditions=[{"type": "Failed", "status": "True"}], disrupted="EvictionByEvictionAPI")
    assert _kubernetes(tmp_path).run(print, print).requeue == "pod pod-0: EvictionByEvictionAPI"


def test_a_job_that_is_stopped_is_deleted_with_time_to_commit(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say(conditions=[])
    attempt = _kubernetes(tmp_path)
    ended = attempt.run(lambda line: attempt.stop("cancelled"), print)
    assert (ended.stopped, ended.requeue) == ("cancelled", "")
    assert any(call.startswith(f"delete job {attempt.name} --wait=false --cascade=foreground") for call in cluster.calls)
    assert attempt.manifests()[2]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 90


def test_what_the_cluster_refuses_is_an_error_with_its_words(cluster: Pretended, tmp_path: Path) -> None:
    (cluster.folder / "refuse").touch()
    with pytest.raises(KubernetesError, match="kubectl apply: admission webhook denied the request"):
        _kubernetes(tmp_path).run(print, print)


def test_a_machine_without_kubectl_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(StageError, match="no 'kubectl'"):
        _kubernetes(tmp_path).run(print, print)


def test_progress_goes_into_the_output_where_there_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(REPORT).update(1, 2, "steps", loss=3.5)
    assert json.loads(capsys.readouterr().out.removeprefix(REPORT)) == {"done": 1, "total": 2, "unit": "steps", "metrics": {"loss": 3.5}}


def test_a_stage_reports_its_error_in_its_output(tmp_path: Path) -> None:
    job = _job(tmp_path).model_copy(update={"progress": REPORT, "kind": "no-such-kind", "store": str(tmp_path / "store")})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "apertus_model.stages", str(tmp_path / "job.json")]
    environment = os.environ | {"APERTUS_STOP_FILE": str(tmp_path / "stop")}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    reports = [json.loads(line.removeprefix(REPORT)) for line in done.stdout.splitlines() if line.startswith(REPORT)]
    assert done.returncode == 1 and "no-such-kind" in reports[0]["error"]["message"]
