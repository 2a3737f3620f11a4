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
from infra.launchers.pod_log import LogReader
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
    since = next((word.partition("=")[2][:19] for word in words if word.startswith("--since-time=")), "")  # the API has seconds
    text, cuts = (folder / "logs.txt").read_text(), json.loads((folder / "cuts.json").read_text())
    lines = text[: cuts[number - 1] if number <= len(cuts) else None].splitlines(keepends=True)
    print("".join(line for line in lines if line[:19] >= since), end="")
elif words[0] == "get":
    number = sum(call[0] == "get" for call in calls)
    looks = json.loads((folder / "looks.json").read_text())
    print(json.dumps({{"items": [] if (folder / "deleted").exists() else looks[min(number, len(looks)) - 1]}}))
elif words[0] == "delete" and words[1] == "job":
    (folder / "deleted").touch()
"""


def _stamped(lines: list[str]) -> str:
    """A log as `kubectl logs --timestamps` prints it, two lines a second."""
    return "".join(f"2026-11-21T17:00:{n // 2:02d}.{n % 2 * 5}00000000Z {line}\n" for n, line in enumerate(lines))


class Pretended:
    """A cluster of files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        program = folder / "bin" / "kubectl"
        program.write_text(KUBECTL.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)

    def say(self, *phases: str, ends: str = "", logs: str = "", cuts: list[int] | None = None, disrupted: str = "") -> None:
        """What kubectl answers: to every look the next phase of the pod, with the last one the condition in which the Job ends; to who asks
        for the log so many characters of it (`cuts`), then all."""
        reasons = [{"type": "DisruptionTarget", "status": "True", "reason": disrupted}] if disrupted else []
        looks = []
        for number, phase in enumerate(phases, 1):
            conditions = [{"type": ends, "status": "True"}] if ends and number == len(phases) else []
            pod = {
                "kind": "Pod",
                "metadata": {"name": "pod-0", "annotations": {"batch.kubernetes.io/job-completion-index": "0"}},
                "status": {"phase": phase, "conditions": reasons},
            }
            looks.append([{"kind": "Job", "metadata": {}, "status": {"conditions": conditions}}, pod])
        (self.folder / "looks.json").write_text(json.dumps(looks))
        (self.folder / "logs.txt").write_text(logs)
        (self.folder / "cuts.json").write_text(json.dumps(cuts or []))

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
    said = ["first", f"{REPORT}{json.dumps(rows)}", f"{REPORT}{json.dumps(report)}", f'{REPORT}{{"done": 2, "to', "last"]
    cluster.say("Failed", ends="Failed", logs=_stamped(said))
    lines: list[str] = []
    told: list[dict[str, Any]] = []
    ended = _kubernetes(tmp_path).run(lines.append, told.append)
    assert (ended.code, ended.error, ended.requeue, told) == (1, report["error"], "", [rows])
    shown = ["first", said[3], "last"]  # a torn report is a line
    assert lines[1:] == shown and (tmp_path / "log.txt").read_text().splitlines() == shown
    assert [call.split()[1] for call in cluster.calls if call.startswith("delete")] == ["job", "service", "configmap"]
    applied = json.loads((cluster.folder / "applied.json").read_text())
    assert [item["kind"] for item in applied["items"]] == ["ConfigMap", "Service", "Job"]


def test_lines_hold_no_secret_and_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    lines: list[str] = []
    report = {"error": {"message": 'refused: {"Authorization": "Token ***', "again": True}}
    reader = LogReader(lines.append, print, tmp_path / "log.txt")
    reader.line(f"{REPORT}{json.dumps(report)}")
    reader.line("GET https://h/x?sig=abc failed")
    assert reader.error == report["error"]
    assert lines == list(reader.tail) == ["GET https://h/x?sig=*** failed"]
    assert (tmp_path / "log.txt").read_text() == "GET https://h/x?sig=*** failed\n"


def test_a_pod_that_the_cluster_evicts_is_no_failure_of_the_stage(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say("Failed", ends="Failed", disrupted="EvictionByEvictionAPI")
    assert _kubernetes(tmp_path).run(print, print).requeue == "pod pod-0: EvictionByEvictionAPI"


def test_a_job_that_is_stopped_is_deleted_with_time_to_commit(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say("Running")
    (cluster.folder / "failures.txt").write_text("delete\n")  # it is told all the same
    attempt = _kubernetes(tmp_path)
    ended = attempt.run(lambda line: attempt.stop("cancelled"), print)
    assert (ended.stopped, ended.requeue) == ("cancelled", "")
    assert sum(call.startswith(f"delete job {attempt.name} --wait=false --cascade=foreground") for call in cluster.calls) == 2


def test_a_pod_has_the_time_that_its_stage_is_told(tmp_path: Path) -> None:
    for launch, seconds in ({}, 90), ({"stop_before_end": Duration(600), "time_limit": Duration(3600)}, 600):
        job = _kubernetes(tmp_path, **launch).manifests()[2]["spec"]
        pod = job["template"]["spec"]
        told = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
        assert (told["APERTUS_STOP_SECONDS"], told["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == (str(seconds), str(seconds + 30))
        assert pod["terminationGracePeriodSeconds"] == seconds + 30
    assert pod["activeDeadlineSeconds"] == 3600 + 630 and "activeDeadlineSeconds" not in job


def test_a_cluster_that_does_not_answer_for_a_while_loses_no_job(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say("Pending", "Running", "Running", "Running", "Succeeded", ends="Complete", logs=_stamped(["trained"]))
    (cluster.folder / "failures.txt").write_text("get\nget\n")
    lines: list[str] = []
    ended = _kubernetes(tmp_path).run(lines.append, print)
    assert (ended.code, ended.tail) == (0, ("trained",))
    assert lines[1:] == ["kubectl get: Unable to connect to the server: net/http: TLS handshake timeout; trying again", "trained"]
    calls = [call.split()[0] for call in cluster.calls if not call.startswith("logs")]
    assert calls == ["apply", *["get"] * 5, *["delete"] * 3]  # it is deleted when it is over


def test_a_job_that_somebody_deleted_is_gone(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say("Running")
    (cluster.folder / "deleted").touch()
    ended = _kubernetes(tmp_path).run(print, print)
    assert (ended.code, ended.stopped, ended.requeue) == (1, "", "")


def test_a_line_comes_once_however_often_the_connection_ends(cluster: Pretended, tmp_path: Path) -> None:
    """Two lines are of one second, which is as exact as what can be asked for; of one only the beginning comes at first."""
    said = [f"line {number}" for number in range(6)]
    text = _stamped(said)
    ends = [index + 1 for index, letter in enumerate(text) if letter == "\n"]
    cluster.say(*["Running"] * 20, "Succeeded", ends="Complete", logs=text, cuts=[0, ends[0], ends[0], ends[2], ends[3] - 3, ends[4]])
    lines: list[str] = []
    assert _kubernetes(tmp_path).run(lines.append, print).code == 0
    assert lines[1:] == said
    assert sum(call.startswith("logs") for call in cluster.calls) > 6


def test_what_a_job_waits_for_nodes_does_not_count_for_its_time_limit(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say(*["Pending"] * 12, "Succeeded", ends="Complete")  # with a poll in 0.05 s
    ended = _kubernetes(tmp_path, processes=8, time_limit=Duration(0.3)).run(print, print)
    assert (ended.code, ended.stopped) == (0, "")
    (cluster.folder / "deleted").unlink()
    cluster.say("Pending", "Running")
    ended = _kubernetes(tmp_path, processes=8, time_limit=Duration(0.3)).run(print, print)
    assert (ended.code, ended.stopped) == (1, "the time limit of 0.3s is over")


def test_what_the_cluster_refuses_is_an_error_with_its_words(cluster: Pretended, tmp_path: Path) -> None:
    (cluster.folder / "refuse").touch()
    with pytest.raises(KubernetesError, match="kubectl apply: admission webhook denied the request"):
        _kubernetes(tmp_path).run(print, print)
    assert [call.split()[1] for call in cluster.calls if call.startswith("delete")] == ["job", "service", "configmap"]  # some may be there


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
