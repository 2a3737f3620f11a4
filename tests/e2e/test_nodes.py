"""Training on several nodes as a cluster starts it, and nodes that fail: the run is over or goes on within
two minutes, leaves nothing behind on any node, and ends in the bits of a run on one machine."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.liveness import is_running
from infra.store import Artifact
from tests.e2e.conftest import SMOKE, Run
from tests.e2e.nodes import Nodes, nodes
from tests.e2e.slurm_on_nodes import PROFILE, Jobs
from tests.e2e.test_hang import rows, weights
from tests.e2e.test_smoke import plan_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WITHIN = 120.0
LAYOUTS = {"FSDP": 2, "a pipeline": 3}  # processes, of as many nodes
STEPS = 60


def overrides(layout: str) -> list[str]:
    return [
        f"stages.pretrain.launch.processes={LAYOUTS[layout]}",
        *([f"stages.pretrain.launch.parallel.pp={LAYOUTS[layout]}"] if layout == "a pipeline" else []),
        "stages.pretrain.model.n_layers=4",
        "stages.pretrain.global_batch_size=8",
        f"stages.pretrain.budget={STEPS} steps",
        "stages.pretrain.validation.interval=0",
        "retries.attempts=1",
    ]


def start(home: Path, store: Path, layout: str, *arguments: str) -> Run:
    command = ["run", SMOKE, "--store", str(store), "--until", "pretrain"]
    return Run(home, *command, *arguments, overrides=overrides(layout))


def pretrained(store: Path, layout: str) -> Artifact:
    plan = plan_of(store, *overrides(layout))
    return Artifact(plan.store, plan.graph.nodes["pretrain"].path, STEPS)


def copy_of(finished: Path, store: Path) -> Path:
    """A store that has the data, and no model."""
    shutil.copytree(finished, store, ignore=shutil.ignore_patterns("pretrain", "cooldown"))
    return store


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(finished: Path, home: Path, tmp_path_factory: pytest.TempPathFactory, layout: str) -> Artifact:
    """What a run on one machine makes."""
    store = copy_of(finished, tmp_path_factory.mktemp("one-machine") / "store")
    run = start(home, store, layout)
    assert run.wait(600) == 0, run.text
    return pretrained(store, layout)


@pytest.fixture
def cluster(tmp_path: Path, layout: str) -> Iterator[Nodes]:
    with nodes(LAYOUTS[layout], tmp_path / "nodes") as made:
        yield made


@pytest.fixture
def jobs(cluster: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    made = Jobs(tmp_path / "slurm", cluster)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


def cut(cluster: Nodes, node: int) -> Callable[[], None]:
    cluster.link(node, "down")
    return lambda: cluster.link(node, "up")


def lose(cluster: Nodes, node: int) -> Callable[[], None]:
    cluster.wire.lost = {node}
    return cluster.wire.lost.clear


def kill(cluster: Nodes, node: int) -> Callable[[], None]:
    cluster.kill(node)
    return lambda: None


def begun(home: Path, store: Path, cluster: Nodes, layout: str) -> Run:
    """A run on the nodes, which has committed something and has more to do."""
    (store / "cluster.yaml").write_text(PROFILE)
    run = start(home, store, layout, "--profile", str(store / "cluster.yaml"))
    made = pretrained(store, layout)
    try:
        run.wait_for(lambda: bool(made.checkpoint_steps()), 300)
    except BaseException:
        run.kill_everything()
        raise
    assert all(cluster.processes(node) for node in cluster.numbers)
    return run


def in_the_same_bits(made: Artifact, expected: Artifact) -> bool:
    return (
        [step for step, *_ in rows(made)] == list(range(1, STEPS + 1))
        and rows(made) == rows(expected)
        and weights(made) == weights(expected)
    )


@pytest.mark.parametrize("fail", [kill, cut, lose])
def test_a_run_that_loses_a_node_ends_on_all_others_and_resumes(
    fail: Callable[[Nodes, int], Callable[[], None]],
    cluster: Nodes,
    jobs: Jobs,
    expected: Artifact,
    finished: Path,
    home: Path,
    tmp_path: Path,
    layout: str,
) -> None:
    store = copy_of(finished, tmp_path / "store")
    run = begun(home, store, cluster, layout)
    try:
        running = {pid: start for node in cluster.numbers for pid, start in cluster.processes(node).items()}
        mend, failed = fail(cluster, cluster.numbers[-1]), time.monotonic()
        left = dict(running)
        while left := {pid: start for pid, start in left.items() if is_running(pid, start)}:
            assert time.monotonic() - failed < WITHIN, f"{len(left)} of {len(running)} processes are left"
            time.sleep(0.1)
        print(f"{layout}, {fail.__name__}: nothing is left after {time.monotonic() - failed:.1f} s")
        mend()
        assert run.wait(400) == 0, run.text
        assert jobs.submitted == 2
        assert run.no_process_is_left(20)
        assert not any(cluster.processes(node) for node in cluster.numbers)
    finally:
        run.kill_everything()
    assert in_the_same_bits(pretrained(store, layout), expected)


def test_a_run_continues_when_the_network_becomes_slow(
    cluster: Nodes, jobs: Jobs, expected: Artifact, finished: Path, home: Path, tmp_path: Path, layout: str
) -> None:
    store = copy_of(finished, tmp_path / "store")
    run = begun(home, store, cluster, layout)
    try:
        cluster.wire.delay, slow = 0.2, time.monotonic()
        before = steps_made(home) + 1  # the one that was under way
        run.wait_for(lambda: steps_made(home) > before, WITHIN)
        print(f"{layout}, slow: the next step is made after {time.monotonic() - slow:.1f} s")
        cluster.wire.delay = 0.0
        assert run.wait(400) == 0, run.text
        assert jobs.submitted == 1
        assert run.no_process_is_left(20)
    finally:
        run.kill_everything()
    assert in_the_same_bits(pretrained(store, layout), expected)


def steps_made(home: Path) -> int:
    """By the one attempt that runs."""
    (progress,) = home.glob("apertus-pretrain-*/progress.jsonl")
    return int(json.loads(progress.read_text().splitlines()[-1])["done"])
