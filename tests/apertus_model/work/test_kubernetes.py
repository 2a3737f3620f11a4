"""Workers as pods: the Jobs against the published schema, what becomes of them against a pretended cluster
that runs the pods' commands here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from apertus_model.work import kubernetes
from apertus_model.work.kubernetes import IndexedJobs, _indexes
from apertus_model.work.units import MOST_LOSSES, WorkerLost
from infra.store import Artifact
from specs.errors import StageError
from specs.job import Job
from tests.apertus_model.attempts import stored_bytes
from tests.apertus_model.corpora import corpus_spec
from tests.apertus_model.work.asking import workers_answer_as_a_local_run
from tests.infra.launchers.pretended import PROFILE

ROOT = Path(__file__).resolve().parents[3]
# A cluster of files: `apply` runs each pod of a Job to its end, with the command of the manifest.
KUBECTL = """#!{python} -IS
# NOT kubectl.
import json, os, pathlib, subprocess, sys
folder = pathlib.Path({folder!r})
words = [word for word in sys.argv[1:] if not word.startswith(("--namespace", "--context"))]
with open(folder / "calls.txt", "a") as calls: calls.write(" ".join(words) + "\\n")
if words[0] == "apply":
    for job in json.load(sys.stdin)["items"]:
        spec, ended = job["spec"], {{"completedIndexes": [], "failedIndexes": []}}
        for index in range(spec["completions"]):
            container = spec["template"]["spec"]["containers"][0]
            command = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"]]
            kills = folder / "kills"
            if kills.exists() and kills.read_text():
                kills.write_text(kills.read_text()[1:])
                code = 137
            else:
                code = subprocess.run([{python!r}, *command[1:]], env={environment!r}).returncode
            ended["failedIndexes" if code else "completedIndexes"].append(str(index))
        job["status"] = {{name: ",".join(indexes) for name, indexes in ended.items()}}
        (folder / (job["metadata"]["name"] + ".json")).write_text(json.dumps(job))
elif words[0] == "get":
    items = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    print(json.dumps({{"items": items}}))
elif words[0] == "logs": print("Killed")
elif words[0] == "delete": (folder / (words[2] + ".json")).unlink(missing_ok=True)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cluster"
    (folder / "bin").mkdir(parents=True)
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "APERTUS_SCRATCH": str(tmp_path)}
    program = folder / "bin" / "kubectl"
    text = KUBECTL.format(python=sys.executable, folder=str(folder), environment=environment)
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(kubernetes, "POLL_SECONDS", 0.05)
    # the pods are processes of this machine, which see its store
    monkeypatch.setattr(kubernetes, "settings_of", lambda profile, job: profile.kubernetes)
    return folder


def _job(bench: Any, kind: str = "completions", gpus: int = 4, **launch: Any) -> Job:
    job = bench.job(
        kind,
        "c",
        {},
        {},
        attempt="20261121T120000-0a1b2c3d",
        workers=1,
        launch={"executor": "kubernetes", "parallel": {"tp": 4}, "workers": launch},
        profile=PROFILE.model_dump(mode="json"),
    )
    return Job.model_validate({**job.model_dump(), "store": "s3://bucket/store", "gpus": gpus})


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("kind", ["completions", "rewards"])
def test_a_job_is_valid_by_the_published_schema(bench: Any, version: str, kind: str) -> None:
    job = IndexedJobs(_job(bench, kind, time_limit="2h", memory="8G", cpus=2)).manifest(0, "shares.json", 3)
    kubernetes_validate.validate(job, version, strict=True)


def test_a_pod_has_a_share_by_its_index_and_the_gpus_of_a_model(bench: Any) -> None:
    jobs = IndexedJobs(_job(bench, count=2))
    manifest = jobs.manifest(1, "completions/c/attempts/a/workers/1.json", 5)
    spec, pod = manifest["spec"], manifest["spec"]["template"]["spec"]
    assert manifest["metadata"]["name"] == f"{jobs.name}-1"
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (5, 2, "Indexed")
    assert (spec["backoffLimitPerIndex"], pod["restartPolicy"]) == (0, "Never")  # no pod ends the others
    container = pod["containers"][0]
    assert container["command"][-3:] == [
        "s3://bucket/store",
        "completions/c/attempts/a/workers/1.json",
        "$(JOB_COMPLETION_INDEX)",
    ]
    assert container["resources"]["limits"] == {"cpu": "96", "memory": "1000Gi", "nvidia.com/gpu": "4"}
    assert container["envFrom"] == [{"secretRef": {"name": "store-keys"}}]
    scored = IndexedJobs(_job(bench, "rewards", gpus=0, cpus=3)).manifest(0, "shares.json", 1)
    limits = scored["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "3"}  # a function scores


def test_pods_need_a_store_that_they_see_and_an_image(bench: Any) -> None:
    job = _job(bench)
    with pytest.raises(StageError, match=r"which pods do not see. Fix: use a store on object storage"):
        IndexedJobs(job.model_copy(update={"store": "/folder"}))
    with pytest.raises(StageError, match=r"no profile states. Fix: run with --profile"):
        IndexedJobs(job.model_copy(update={"profile": job.profile.model_copy(update={"kubernetes": None})}))


def _run(bench: Any, documents: Path, tokenizer: Artifact, name: str, **launch: Any) -> Artifact:
    spec, inputs = corpus_spec(documents, files_per_task=20), {"tokenizer": tokenizer}
    profile = PROFILE.model_dump(mode="json")
    return bench.run("corpus", name, spec, inputs, launch=launch, profile=profile)


def test_pods_write_the_bytes_of_a_local_run_though_one_is_killed(
    bench: Any, documents: Path, tokenizer: Artifact, cluster: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = _run(bench, documents, tokenizer, "here")
    (cluster / "kills").write_text("x")  # the first pod
    workers = {"units_per_job": 2}
    pods = _run(bench, documents, tokenizer, "pods", executor="kubernetes", workers=workers)
    assert stored_bytes(pods) == stored_bytes(here)
    output = capfd.readouterr().out
    assert "2 units are submitted again: pod 0 of the Job" in output and "its log ends:\nKilled" in output
    calls = [call.split()[0] for call in (cluster / "calls.txt").read_text().splitlines()]
    # the passes after the filter tasks are small, and no Jobs
    assert calls == ["apply", "get", "logs", "apply", "get", "delete", "delete"]
    assert bench.store.names("corpus/pods/attempts/first/workers") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["harness", "completions", "continuations"])
def test_pods_ask_a_model_for_the_answers_of_a_local_run(
    bench: Any, tmp_path: Path, tokenizer: Artifact, cluster: Path, kind: str
) -> None:
    launch, profile = {"executor": "kubernetes"}, PROFILE.model_dump(mode="json")
    workers_answer_as_a_local_run(bench, tmp_path, tokenizer, kind, launch, profile)
    calls = [call.split()[0] for call in (cluster / "calls.txt").read_text().splitlines()]
    assert calls == ["apply", "get", "delete"]


def test_a_unit_whose_pods_always_end_is_an_error(
    bench: Any, documents: Path, tokenizer: Artifact, cluster: Path
) -> None:
    (cluster / "kills").write_text("x" * 9)
    with pytest.raises(WorkerLost, match="its log ends:\nKilled"):
        _run(bench, documents, tokenizer, "pods", executor="kubernetes", workers={"units_per_job": 3})
    calls = [call.split()[0] for call in (cluster / "calls.txt").read_text().splitlines()]
    assert calls.count("apply") == MOST_LOSSES == calls.count("delete")
    assert not list(cluster.glob("*.json"))


def test_indexes_are_read_as_kubernetes_writes_them() -> None:
    assert list(_indexes("")) == [] and list(_indexes("1,3-5,7")) == [1, 3, 4, 5, 7]
