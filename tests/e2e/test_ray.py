"""Runs on a Ray cluster of several nodes, and what fails there: whatever becomes of workers, nodes, the head
and the run itself, nothing hangs or stays behind, and the same command ends in the bits of an undisturbed run
on one machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Artifact, Store
from specs.recipe import load
from tests.e2e import held_texts
from tests.e2e.conftest import Run, ended_as_interrupted
from tests.e2e.nodes import Nodes, nodes
from tests.e2e.prefect_server import Prefect
from tests.e2e.ray_on_nodes import ADDRESS, CLIENT, HEAD, RayNodes
from tests.e2e.test_hang import rows, weights

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BESIDE = 4  # a node without Ray
UNITS = 8
STEPS = 60
WAIT = 240.0  # on a busy machine
SLOW = 0.5  # seconds that a packet takes
RECIPE = f"""
name: two-nodes
launch: {{processes: 1, threads: 1, workers: {{count: 2}}}}
retries: {{attempts: 1, backoff: 1s}}
sources:
  texts:
    url: TEXTS
    format: documents
    reader: tests.e2e.held_texts:lines
    version: 1
    include: ["*.txt"]
    license: CC0-1.0
stages:
  tokenizer: {{kind: tokenizer, sources: [texts], vocab_size: 512}}
  corpus: {{kind: corpus, tokenizer: tokenizer, files_per_task: 1, sources: {{texts: {{holdout: 0.1}}}}}}
  main: {{kind: mixture, weights: {{corpus/texts: 1}}, max_repetition: 100}}
  pretrain:
    kind: pretrain
    launch: {{processes: 2}}
    model: {{dim: 64, n_layers: 2, n_heads: 4, n_kv_heads: 2, head_dim: 16, ffn_dim: 128, vocab_size: 512}}
    mixture: main
    sequence_length: 64
    global_batch_size: 8
    micro_batch_size: 2
    budget: {STEPS} steps
    optimizer: {{lr: 5e-3, betas: [0.9, 0.999, 0.999], alpha_warmup: 30 steps, beta3_warmup: 30 steps}}
    schedule: {{warmup: 5 steps}}
    precision: {{param: float32}}
    checkpoint: {{interval: 5, keep: 2}}
    validation: {{interval: 0}}
"""
UNITS_BY_RAY = "executor: ray"
TRAINING_BY_RAY = "launcher: ray"


class PrefectOnNode(Prefect):
    """A server on the node without Ray, for runs that are not about their own: to start one takes ten
    seconds."""

    host = f"10.77.0.{BESIDE}"

    def __init__(self, home: Path, nodes: Nodes) -> None:
        super().__init__(home)
        self._nodes = nodes

    def command_line(self, *words: str) -> list[str]:
        return self._nodes.on(BESIDE, *words)

    def answers(self) -> bool:
        ask = f"import urllib.request; urllib.request.urlopen('{self.api}/health')"
        command = self.command_line(sys.executable, "-c", ask)
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Case:
    """A store that has everything but what is made on the cluster."""

    def __init__(self, cluster: RayNodes, undisturbed: Path, home: Path, folder: Path, api: str) -> None:
        self.cluster, self.home, self.folder, self.api = cluster, home, folder, api
        self.undisturbed, self.store = undisturbed, folder / "store"
        self.texts = undisturbed.parent / "texts"
        self.recipe = shutil.copy(undisturbed.parent / "recipe.yaml", folder)
        self.runs: list[Run] = []

    def start(self, how: str, node: int = HEAD) -> Run:
        """A run on a node, whose units or training are on the cluster."""
        until = {UNITS_BY_RAY: "main", TRAINING_BY_RAY: "pretrain"}[how]
        if not self.store.exists():
            made = {UNITS_BY_RAY: ("corpus", "mixture", "pretrain"), TRAINING_BY_RAY: ("pretrain",)}[how]
            shutil.copytree(self.undisturbed, self.store, ignore=shutil.ignore_patterns(*made))
        address = ADDRESS if node == HEAD else CLIENT
        profile = self.folder / f"profile-{len(self.runs)}.yaml"
        profile.write_text(f"{how}\nray: {{address: '{address}', gpus: false}}\n")
        words = [
            "run",
            str(self.recipe),
            "--store",
            str(self.store),
            "--until",
            until,
            "--profile",
            str(profile),
        ]
        run = Run(self.home, *words, api=self.api, on=self.cluster.on(node))
        self.runs.append(run)
        return run

    def computing(self, *nodes: int) -> bool:
        """Whether a worker on each of these nodes computes a unit."""
        return all(
            any("ray::UnitWorker.run" in words for words in self.cluster.ours(node).values())
            for node in nodes
        )

    def begun_again(self) -> int:
        """How many units the stage that runs has begun again."""
        return sum(
            line.startswith("unit ") and " is begun again: " in line
            for log in self.home.glob("apertus-corpus-*/log.txt")
            for line in log.read_text().splitlines()
        )

    def pretrained(self) -> Artifact:
        return pretrained(self.store)

    def finishes(self, how: str, node: int = HEAD) -> None:
        """A run goes to its end, and leaves nothing on any node."""
        run = self.start(how, node)
        assert run.wait(400) == 0, run.text
        self.is_over(run)

    def is_over(self, run: Run, within: float = 30) -> None:
        """Neither this machine nor a node has a process of the run."""
        assert run.no_process_is_left(within), run.text
        assert self.cluster.nothing_is_left(within), [*map(self.cluster.ours, self.cluster.nodes.numbers)]

    def has_the_same_files(self) -> bool:
        return files(self.store) == files(self.undisturbed)

    def has_the_same_steps(self) -> bool:
        made, expected = self.pretrained(), pretrained(self.undisturbed)
        return (
            [step for step, *_ in rows(made)] == [*range(1, STEPS + 1)]
            and rows(made) == rows(expected)
            and weights(made) == weights(expected)
        )


def plan_of(store: Path) -> Plan:
    return make(load(store.parent / "recipe.yaml"), Store.open(str(store)))


def files(store: Path) -> dict[str, str]:
    """Digests of the files of the corpus, by name."""
    plan = plan_of(store)
    manifest = Artifact(plan.store, plan.graph.nodes["corpus/texts"].path).manifest
    return {name: record.sha256 for name, record in manifest.files.items()}


def pretrained(store: Path) -> Artifact:
    plan = plan_of(store)
    return Artifact(plan.store, plan.graph.nodes["pretrain"].path, STEPS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    folder = tmp_path_factory.mktemp("cluster")
    with nodes(BESIDE, folder / "nodes") as made, pytest.MonkeyPatch.context() as patch:
        ray = RayNodes(made, folder / "ray", workers=(2, 3))
        for name, value in ray.environment.items():
            patch.setenv(name, value)
        yield ray


@pytest.fixture(scope="module")
def prefect(cluster: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server."""
    server = PrefectOnNode(tmp_path_factory.mktemp("server"), cluster.nodes)
    try:
        server.start_server()
        yield server.api
    finally:
        server.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Path:
    """A store in which the recipe ran on this machine."""
    folder = tmp_path_factory.mktemp("one-machine")
    held_texts.write(folder / "texts", UNITS)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("TEXTS", str(folder / "texts")))
    run = Run(home, "run", str(recipe), "--store", str(folder / "store"))
    assert run.wait(600) == 0, run.text
    return folder / "store"


@pytest.fixture
def case(cluster: RayNodes, undisturbed: Path, home: Path, tmp_path: Path, prefect: str) -> Iterator[Case]:
    cluster.mend()
    made = Case(cluster, undisturbed, home, tmp_path, prefect)
    try:
        yield made
    finally:
        for run in made.runs:
            run.kill_everything()
        for file in (made.texts / held_texts.HOLD, *made.texts.glob(f"*{held_texts.WRONG}")):
            file.unlink(missing_ok=True)
        for node in cluster.nodes.numbers:
            cluster.nodes.link(node, "up")
        cluster.nodes.wire.delay = 0


class Clock:
    """Says how long something took."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def says(self, what: str) -> None:
        print(f"{what}: {time.monotonic() - self._since:.1f} s", flush=True)


def test_units_survive_the_nodes_that_compute_them(case: Case) -> None:
    """A node that is killed, the same node as it comes back, and another one that is cut off."""
    hold, cluster = case.texts / held_texts.HOLD, case.cluster
    hold.touch()
    run = case.start(UNITS_BY_RAY)
    run.wait_for(lambda: case.computing(2, 3), WAIT)
    clock = Clock()
    cluster.nodes.kill(2)
    run.wait_for(lambda: case.begun_again() == 1, WAIT)
    clock.says("the unit of a killed node is begun again")
    clock = Clock()
    cluster.start(2)
    run.wait_for(lambda: case.computing(2), WAIT)
    clock.says("a node that comes back has work")
    clock = Clock()
    cluster.nodes.link(3, "down")
    run.wait_for(lambda: case.begun_again() == 2, 120)
    clock.says("the unit of a node that is cut off is begun again")
    hold.unlink()
    assert run.wait(200) == 0, run.text
    cluster.nodes.link(3, "up")
    clock = Clock()
    case.is_over(run, 120)
    clock.says("nothing is left on the node that was cut off")
    assert case.has_the_same_files()


def test_units_end_with_their_run(case: Case) -> None:
    """A run that is killed, one that is interrupted, and one with a wrong unit."""
    hold = case.texts / held_texts.HOLD
    hold.touch()
    run = case.start(UNITS_BY_RAY)
    run.wait_for(lambda: case.computing(2, 3), WAIT)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    clock = Clock()
    case.is_over(run, 10)
    clock.says("units, kill -9 of the run: nothing is left")

    run = case.start(UNITS_BY_RAY)
    run.wait_for(lambda: case.computing(2, 3), WAIT)
    clock = Clock()
    ended_as_interrupted(run, lambda: os.killpg(run.process.pid, signal.SIGINT))
    clock.says("units, Ctrl-C: the run is over")
    case.is_over(run, 5)

    hold.unlink()
    wrong = case.texts / f"03.txt{held_texts.WRONG}"
    wrong.touch()
    run = case.start(UNITS_BY_RAY)
    assert run.wait(120) == 1, run.text
    assert "failed at '03.txt'" in run.text and "ValueError: a wrong text" in run.text, run.text
    case.is_over(run)
    wrong.unlink()

    case.finishes(UNITS_BY_RAY)
    assert case.has_the_same_files()


def test_a_stage_that_loses_the_cluster_ends_with_an_error(case: Case) -> None:
    """The node through which it is connected ends, then the head. Started again, they finish the work."""
    hold = case.texts / held_texts.HOLD
    for program, says in (
        ("raylet", "the node of the Ray cluster"),
        ("gcs_server", "Failed to connect to GCS"),
    ):
        hold.touch()
        case.cluster.mend()
        run = case.start(UNITS_BY_RAY)
        run.wait_for(lambda: case.computing(2, 3), WAIT)
        clock = Clock()
        for pid in case.cluster.pids(HEAD, program):
            os.kill(pid, signal.SIGKILL)
        assert run.wait(150) == 1, run.text
        clock.says(f"units, kill -9 of the {program}: the run has ended")
        assert says in run.text, run.text
        case.is_over(run, 120)
        clock.says(f"units, kill -9 of the {program}: nothing is left")
        hold.unlink()
    case.cluster.mend()
    case.finishes(UNITS_BY_RAY)
    assert case.has_the_same_files()


def test_memory_that_is_exhausted_is_said_in_plain_words(case: Case) -> None:
    """A node whose limit is so low that Ray ends every worker, with each unit once and again."""
    for node in (2, 3):
        case.cluster.nodes.kill(node)
    case.cluster.start(2, RAY_memory_usage_threshold="0.01", RAY_memory_monitor_refresh_ms="250")
    (case.texts / held_texts.HOLD).touch()
    run = case.start(UNITS_BY_RAY)
    clock = Clock()
    assert run.wait(200) == 1, run.text
    clock.says("units, memory exhausted: the run has ended")
    case.cluster.nodes.kill(2)
    (said,) = (line for line in run.text.splitlines() if line.startswith("failed: corpus/texts"))
    assert "WorkerLost: OutOfMemoryError: " in said and "node (IP: 10.77.0.2) was " in said
    assert "Object store" not in said
    case.is_over(run)


def begun(case: Case, node: int = HEAD) -> Run:
    """A run that trains on two nodes, and has committed something that it had not before."""
    before = case.pretrained().checkpoint_steps() if case.store.exists() else []
    run = case.start(TRAINING_BY_RAY, node)
    made = case.pretrained()
    run.wait_for(lambda: made.checkpoint_steps()[-1:] > before[-1:], WAIT)
    return run


def test_training_survives_the_nodes_that_it_loses(case: Case) -> None:
    """A node that is killed, and, when training has resumed, one that is cut off."""
    cluster = case.cluster
    run = begun(case)
    made = case.pretrained()
    clock = Clock()
    cluster.nodes.kill(3)
    run.wait_for(lambda: "because node 10.77.0.3 was lost" in run.text, WAIT)
    clock.says("training, a killed node: submitted again")
    cluster.start(3)
    before = made.checkpoint_steps()[-1]
    run.wait_for(lambda: made.checkpoint_steps()[-1] > before, WAIT)
    clock.says("training, a killed node: the next checkpoint")
    cluster.nodes.link(2, "down")
    clock = Clock()
    run.wait_for(lambda: run.text.count("submitted again") == 2, WAIT)
    clock.says("training, a node that is cut off: submitted again")
    cluster.nodes.link(2, "up")
    run.wait_for(lambda: not cluster.ours(2) and not cluster.raylet(2), 120)
    cluster.start(2)
    assert run.wait(300) == 0, run.text
    case.is_over(run)
    assert case.has_the_same_steps()


@pytest.mark.parametrize("node", [HEAD, BESIDE], ids=["on a node", "beside the cluster"])
def test_training_commits_when_its_run_ends(case: Case, node: int) -> None:
    """A run that is killed, and one that is interrupted."""
    made = case.pretrained
    run = begun(case, node)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    clock, before = Clock(), made().checkpoint_steps()[-1]
    case.is_over(run)
    clock.says("training, kill -9 of the run: nothing is left")
    killed = made().checkpoint_steps()[-1]
    assert before < killed < STEPS

    run = begun(case, node)
    clock = Clock()
    ended_as_interrupted(run, lambda: os.killpg(run.process.pid, signal.SIGINT))
    clock.says("training, Ctrl-C: the run is over")
    case.is_over(run, 5)
    assert killed < made().checkpoint_steps()[-1] < STEPS

    case.finishes(TRAINING_BY_RAY, node)
    assert case.has_the_same_steps()


def test_training_commits_when_it_loses_the_cluster(case: Case) -> None:
    """The node through which its run is connected ends, then the head, then the head's whole machine, with
    the run on it. On a slow network, so that the training is not over before Ray has noticed."""
    cluster = case.cluster
    for lost in ("raylet", "gcs_server", "machine"):
        cluster.mend()
        run = begun(case)
        before = case.pretrained().checkpoint_steps()[-1]
        cluster.nodes.wire.delay = SLOW
        clock = Clock()
        if lost == "machine":
            cluster.nodes.kill(HEAD)
            run.process.wait()
        else:
            for pid in cluster.pids(HEAD, lost):
                os.kill(pid, signal.SIGKILL)
            assert run.wait(300) == 1, run.text
            clock.says(f"training, kill -9 of the {lost}: the run has ended")
            assert "waiting up to 150 s for the commit of its stage" in run.text, run.text
        case.is_over(run, 150)
        clock.says(f"training, kill -9 of the {lost}: nothing is left")
        cluster.nodes.wire.delay = 0
        assert before < case.pretrained().checkpoint_steps()[-1] < STEPS, run.text
    cluster.mend()
    case.finishes(TRAINING_BY_RAY)
    assert case.has_the_same_steps()


def test_units_end_with_a_stage_beside_the_cluster(case: Case) -> None:
    """Ray notices within half a minute that a client was killed."""
    hold = case.texts / held_texts.HOLD
    hold.touch()
    run = case.start(UNITS_BY_RAY, BESIDE)
    run.wait_for(lambda: case.computing(2, 3), WAIT)
    clock = Clock()
    run.kill_everything()
    case.is_over(run, 60)
    clock.says("units, kill -9 of run and stage beside the cluster: nothing is left")
    hold.unlink()
    case.finishes(UNITS_BY_RAY, BESIDE)
    assert case.has_the_same_files()
