"""Attempts as Jobs of Kubernetes: the objects against the published schema, what becomes of them against a
pretended kubectl."""

from __future__ import annotations

import json
from pathlib import Path

import kubernetes_validate
import pytest

from infra import kubernetes
from infra.kubernetes import KubernetesError, object_name
from infra.launchers import launch_job
from infra.launchers.kubernetes import KubernetesJob
from infra.launchers.local import Process
from specs.errors import StageError
from specs.job import REPORT, Job
from specs.launch import Launch, Parallel, Workers
from specs.profiles import KubernetesProfile
from specs.units import Duration
from tests.infra.launchers.pretended import PROFILE, Pretended, a_job, a_kubernetes_job, stamped


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_every_object_is_valid_by_the_published_schema(
    tmp_path: Path, version: str, distributed: bool
) -> None:
    manifests = a_kubernetes_job(tmp_path, distributed=distributed, time_limit=Duration(3600)).manifests()
    assert [document["kind"] for document in manifests] == ["ConfigMap", "Service", "Job"]
    for document in manifests:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_would_notice_a_mistake(tmp_path: Path) -> None:
    job = a_kubernetes_job(tmp_path).manifests()[2]
    job["spec"]["completionmode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_a_pod_per_node_finds_the_first_one(tmp_path: Path) -> None:
    attempt = a_kubernetes_job(tmp_path)
    files, service, job = attempt.manifests()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"], spec["backoffLimit"]) == (
        2,
        2,
        "Indexed",
        0,
    )
    container = pod["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    name = attempt.name
    assert {
        "--nnodes=2",
        "--nproc-per-node=8",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={name}-0.{name}",
    } <= set(container["command"])
    assert pod["subdomain"] == service["metadata"]["name"] == name
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    inside = Job.model_validate_json(files["data"]["job.json"])
    assert (inside.progress, inside.scratch, inside.store) == (REPORT, "/scratch", "s3://bucket/store")


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_a_part_of_one_process_has_the_gpus_that_it_uses_on_one_node(tmp_path: Path, gpus: int) -> None:
    launch = Launch(processes=16, parallel=Parallel(tp=4))
    job = a_job(tmp_path).model_copy(update={"launch": launch, "gpus": gpus})
    attempt = launch_job(job, launch, PROFILE, distributed=False)
    # what uses no GPU stays where the launcher is
    assert isinstance(attempt, KubernetesJob) == (gpus > 0)
    described = KubernetesJob(job, launch, PROFILE, distributed=False).manifests()[2]["spec"]
    assert described["completions"] == 1
    limits = described["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == (str(gpus) if gpus else None)


def test_a_pod_has_gpus_for_all_its_workers_and_a_stage_that_submits_workers_stays_here(
    tmp_path: Path,
) -> None:
    job = a_job(tmp_path).model_copy(
        update={"kind": "completions", "launch": Launch(parallel=Parallel(tp=4)), "gpus": 4}
    )
    for executor, kind in (None, KubernetesJob), ("kubernetes", Process), ("slurm", Process):
        launch = Launch(executor=executor, workers=Workers(count=2), parallel=Parallel(tp=4))
        attempt = launch_job(job, launch, PROFILE, distributed=False, in_units=True)
        assert isinstance(attempt, kind)
        if isinstance(attempt, KubernetesJob):
            container = attempt.manifests()[2]["spec"]["template"]["spec"]["containers"][0]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    for tp, gpus in (1, "8"), (3, "6"), (16, "16"):  # by default a node of eight is filled
        launch = Launch(processes=tp, parallel=Parallel(tp=tp))
        sampling = job.model_copy(update={"launch": launch, "gpus": tp})
        attempt = launch_job(sampling, launch, PROFILE, distributed=False, in_units=True)
        assert isinstance(attempt, KubernetesJob)
        container = attempt.manifests()[2]["spec"]["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    # what has no units runs there all the same
    assert isinstance(launch_job(job, launch, PROFILE, distributed=False), KubernetesJob)


def test_secrets_are_named_and_never_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-7f3a")
    manifests = a_kubernetes_job(tmp_path).manifests()
    assert manifests[2]["spec"]["template"]["spec"]["containers"][0]["envFrom"] == [
        {"secretRef": {"name": "store-keys"}}
    ]
    assert "planted-7f3a" not in json.dumps(manifests)


def test_a_store_on_this_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"which pods do not see. Fix: use a store on object storage"):
        launch_job(
            a_job(tmp_path, store=str(tmp_path)), Launch(processes=1, threads=1), PROFILE, distributed=True
        )


@pytest.mark.parametrize(
    ("pipeline", "node"), [("mini", "pretrain/2"), ("UPPER_case.yaml", "a" * 80), ("x", "-")]
)
def test_names_are_what_kubernetes_takes(pipeline: str, node: str) -> None:
    name = object_name(pipeline, node, "20261121T120000-0a1b2c3d")
    assert len(name) <= 52 and name[0].isalpha() and name[-1].isalnum()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name != object_name(pipeline, node, "20261121T120000-0a1b2c3e")


def test_a_pod_that_the_cluster_evicts_is_no_failure_of_the_stage(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say("Failed", ends="Failed", disrupted="EvictionByEvictionAPI")
    assert a_kubernetes_job(tmp_path).run(print, print).requeue == "pod pod-0: EvictionByEvictionAPI"


def test_a_job_that_is_stopped_is_deleted_with_time_to_commit(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say("Running")
    (cluster.folder / "failures.txt").write_text("delete\n")  # it is told all the same
    attempt = a_kubernetes_job(tmp_path)
    ended = attempt.run(lambda line: attempt.stop("cancelled"), print)
    assert (ended.stopped, ended.requeue) == ("cancelled", "")
    assert (
        sum(
            call.startswith(f"delete job {attempt.name} --wait=false --cascade=foreground")
            for call in cluster.calls
        )
        == 2
    )


def test_a_pod_has_the_time_that_its_stage_is_told(tmp_path: Path) -> None:
    for launch, seconds in ({}, 90), ({"stop_before_end": Duration(600), "time_limit": Duration(3600)}, 600):
        job = a_kubernetes_job(tmp_path, **launch).manifests()[2]["spec"]
        pod = job["template"]["spec"]
        told = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
        assert (told["APERTUS_STOP_SECONDS"], told["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == (
            str(seconds),
            str(seconds + 30),
        )
        assert pod["terminationGracePeriodSeconds"] == seconds + 30
    assert pod["activeDeadlineSeconds"] == 3600 + 630 and "activeDeadlineSeconds" not in job


def test_a_cluster_that_does_not_answer_for_a_while_loses_no_job(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say(
        "Pending", "Running", "Running", "Running", "Succeeded", ends="Complete", logs=stamped(["trained"])
    )
    (cluster.folder / "failures.txt").write_text("get\nget\n")
    lines: list[str] = []
    ended = a_kubernetes_job(tmp_path).run(lines.append, print)
    assert (ended.code, ended.tail) == (0, ("trained",))
    assert lines[1:] == [
        "kubectl get: Unable to connect to the server: net/http: TLS handshake timeout; trying again",
        "trained",
    ]
    calls = [call.split()[0] for call in cluster.calls if not call.startswith("logs")]
    assert calls == ["apply", *["get"] * 5, *["delete"] * 3]  # it is deleted when it is over


def test_a_job_that_somebody_deleted_is_gone(cluster: Pretended, tmp_path: Path) -> None:
    cluster.say("Running")
    (cluster.folder / "deleted").touch()
    ended = a_kubernetes_job(tmp_path).run(print, print)
    assert (ended.code, ended.stopped, ended.requeue) == (1, "", "")


def test_what_a_job_waits_for_nodes_does_not_count_for_its_time_limit(
    cluster: Pretended, tmp_path: Path
) -> None:
    cluster.say(*["Pending"] * 12, "Succeeded", ends="Complete")  # with a poll in 0.05 s
    ended = a_kubernetes_job(tmp_path, processes=8, time_limit=Duration(0.3)).run(print, print)
    assert (ended.code, ended.stopped) == (0, "")
    (cluster.folder / "deleted").unlink()
    cluster.say("Pending", "Running")
    ended = a_kubernetes_job(tmp_path, processes=8, time_limit=Duration(0.3)).run(print, print)
    assert (ended.code, ended.stopped) == (1, "the time limit of 0.3s was reached")


def test_what_the_cluster_refuses_is_an_error_with_its_words(cluster: Pretended, tmp_path: Path) -> None:
    (cluster.folder / "refuse").touch()
    with pytest.raises(KubernetesError, match="kubectl apply: admission webhook denied the request"):
        a_kubernetes_job(tmp_path).run(print, print)
    # some may be there
    assert [call.split()[1] for call in cluster.calls if call.startswith("delete")] == [
        "job",
        "service",
        "configmap",
    ]


def test_a_kubectl_that_does_not_end_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(kubernetes, "ANSWER_SECONDS", 0.2)
    with pytest.raises(KubernetesError, match=r"kubectl get: no answer for 0\.2 s"):
        kubernetes.Kubectl(KubernetesProfile(image="image")).items("jobs", "a", "b")


def test_a_machine_without_kubectl_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(StageError, match="no 'kubectl'"):
        a_kubernetes_job(tmp_path).run(print, print)
