"""A run on a Ray cluster inside one allocation of a real Slurm, of two nodes, by the script that is there to
copy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store import Artifact, Store
from tests.e2e.conftest import ROOT, SMOKE, Run
from tests.e2e.nodes import nodes
from tests.e2e.test_hang import rows, weights
from tests.e2e.test_nodes import overrides, pretrained
from tests.e2e.test_smoke import plan_of
from tests.infra.slurm import LittleSlurm, little_slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SCRIPT = ROOT / "infra" / "profiles" / "ray-slurm.sh"
CORPORA = ("corpus/code", "corpus/reference", "corpus/translations")
LAYOUT = "FSDP"  # on two nodes
PROFILE = """
launcher: ray
executor: ray
ray: {gpus: false}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[LittleSlurm]:
    """`ray symmetric-run` ends with `ray stop`, which ends all of Ray that it sees."""
    with (
        nodes(2, tmp_path / "nodes") as made,
        little_slurm(tmp_path / "slurm", alone=True, nodes=made) as running,
    ):
        yield running


def _digests(store: Path) -> dict[str, str]:
    graph = plan_of(store, *overrides(LAYOUT)).graph
    return {
        f"{name}/{file}": record.sha256
        for name in CORPORA
        for file, record in Artifact(Store.open(str(store)), graph.nodes[name].path).manifest.files.items()
    }


def test_the_script_makes_what_one_machine_makes_and_leaves_nothing(
    slurm: LittleSlurm, home: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    here, there = tmp_path / "here", tmp_path / "there"
    until = ("--until", "pretrain")
    alone = Run(home, "run", SMOKE, "--store", str(here), *until, overrides=overrides(LAYOUT))
    assert alone.wait(600) == 0, alone.text

    profile = tmp_path / "ray.yaml"
    profile.write_text(PROFILE)
    (tmp_path / "job").mkdir()
    changes = [word for override in overrides(LAYOUT) for word in ("--set", override)]
    submitted = subprocess.run(
        [
            *(*slurm.on, "sbatch", "--wait", "--nodes=2", "--output=out.txt", str(SCRIPT), str(ROOT / SMOKE)),
            *("--profile", str(profile), "--store", str(there), *until, *changes),
        ],
        cwd=tmp_path / "job",
        env=os.environ
        | slurm.environment
        | {
            "PATH": f"{Path(sys.executable).parent}:{slurm.environment['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PREFECT_HOME": str(home / "prefect"),
            "APERTUS_SCRATCH": str(home),
        },
        timeout=900,
    )
    output = (tmp_path / "job" / "out.txt").read_text()
    assert submitted.returncode == 0, output
    assert "Running command on head node" in output
    assert [file.name for file in (tmp_path / "job").iterdir()] == ["out.txt"]
    assert _digests(there) == _digests(here)
    trained = pretrained(there, LAYOUT)
    assert rows(trained) == rows(pretrained(here, LAYOUT))
    assert weights(trained) == weights(pretrained(here, LAYOUT))
    (log,) = (there / trained.path / "logs").iterdir()
    assert "on 10.77.0.1, 10.77.0.2: 1 processes on each" in log.read_text()
    assert not list(Path("/tmp").glob("ray-[0-9]*"))
