"""The manifests for KubeRay, as far as that goes without Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "infra" / "kuberay"


def _spec(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = YAML(typ="safe").load(FOLDER / name)["spec"]
    return spec


@pytest.fixture(params=["raycluster.yaml", "rayjob.yaml"])
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    spec = _spec(request.param)
    cluster: dict[str, Any] = spec.get("rayClusterSpec", spec)
    return cluster


def _containers(cluster: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield from group["template"]["spec"]["containers"]


def test_a_cluster_asks_for_a_token_and_leaves_its_head_alone(cluster: dict[str, Any]) -> None:
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for container in _containers(cluster):
        variables = {one["name"]: one["value"] for one in container["env"]}
        assert variables["RAY_USAGE_STATS_ENABLED"] == "0"
        assert variables["RAY_kill_child_processes_on_worker_exit"] == variables["RAY_worker_niceness"] == "0"
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_a_cluster_has_the_pinned_ray_and_the_image_has_what_the_operator_asks_for(
    cluster: dict[str, Any],
) -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert cluster["rayVersion"] == pinned["ray"]
    extras = re.findall(r"^(\w+) = \[\"ray(\S*)==(\S+)\"\]", (ROOT / "pyproject.toml").read_text(), re.M)
    assert extras == [("kuberay", "[default]", pinned["ray"]), ("ray", "", pinned["ray"])]
    (installed,) = re.findall(
        r"^ARG EXTRAS=(.+)$", (ROOT / "infra" / "docker" / "Dockerfile").read_text(), re.M
    )
    assert "kuberay" in installed.split(",")


def test_a_job_has_the_nodes_of_a_cluster_and_the_recipe_on_its_head() -> None:
    job, cluster = _spec("rayjob.yaml"), _spec("raycluster.yaml")
    pod = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = pod.pop("volumes")
    (mount,) = pod["containers"][0].pop("volumeMounts")
    assert job["rayClusterSpec"] == cluster
    assert mount["name"] == volume["name"]
    words = job["entrypoint"].split()
    assert words[:2] == ["apertus", "run"]
    assert words[2].startswith(mount["mountPath"]) and words[4].startswith(mount["mountPath"])
    assert job["shutdownAfterJobFinishes"] is True
