"""Two runs of one recipe over one store: one works, the other waits and reuses, or takes over."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3fs

from flows.execution.runner import Interrupted, Runner, StageFailed
from flows.planning.graph import Node
from flows.planning.plan import Plan, Step, make
from flows.stored_part import planned_parts
from infra.launchers.local import Ended, Process
from infra.store import Artifact, Attempt, Store
from infra.store.writing.lease import Leases, Seen, Timing
from specs.job import Failure, Job
from specs.launch import Launch
from specs.recipe import load
from tests.infra.sealed import sealed
from tests.machine import slow

QUICK = Timing(seconds=2.0, look=0.02, settle=0.0)
OVER = 20.0  # seconds after which a test has hung

Work = Callable[[Attempt, "InThread"], None]


class InThread(Process):
    """A stage that is a function of this process. `told` is set when it is asked to stop."""

    def __init__(self, job: Job, work: Work, store: Store) -> None:
        super().__init__(job, Launch(), distributed=False)
        self.work = work
        self.store = store
        self.told = threading.Event()
        self.reason = ""

    def run(
        self, on_line: Any, on_progress: Any, on_start: Callable[[int], None] = lambda pipe: None
    ) -> Ended:
        attempt = Attempt(self.job, self.store)
        attempt.begin()
        try:
            self.work(attempt, self)
        except Exception as error:
            return Ended(1, self.reason, (), Failure(message=str(error), again=True))
        return Ended(0, self.reason, (), None)

    def stop(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.told.set()


class Run(Runner):
    """A run in a thread, whose stages are `work`."""

    def __init__(self, plan: Plan, work: Work, timing: Timing = QUICK) -> None:
        super().__init__(plan, self, timing)
        self.work = work
        self.notes: list[str] = []
        self.outcomes: list[str] = []
        self.attempts: list[Job] = []
        self.error: BaseException | None = None

    def begin(self, step: Step) -> None: ...
    def line(self, name: str, text: str) -> None: ...
    def progress(self, name: str, row: dict[str, Any]) -> None: ...
    def note(self, name: str, text: str) -> None:
        self.notes.append(text)

    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None:
        self.outcomes.append(outcome)

    def _process(self, job: Job, node: Node) -> Process:
        self.attempts.append(job)
        return InThread(job, self.work, self.plan.store)

    def start(self, part: str = "tokenizer") -> Run:
        def go() -> None:
            try:
                self.run(self.plan.graph.nodes[part])
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=go, daemon=True)
        self.thread.start()
        return self

    def wait(self) -> Run:
        self.thread.join(OVER)
        assert not self.thread.is_alive(), "the run hangs"
        return self

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(int(OVER / 0.01)):
            if condition():
                return
            self.thread.join(0.01)
        raise AssertionError(f"it did not happen; notes: {self.notes}, error: {self.error}")


@pytest.fixture(params=["file", "memory", slow("s3")])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        endpoint = request.getfixturevalue("moto").endpoint
        fs = s3fs.S3FileSystem(
            key="testing", secret="testing", endpoint_url=endpoint, use_listings_cache=False
        )
        bucket = f"bucket-{uuid.uuid4().hex}"
        fs.makedirs(bucket, exist_ok=True)
        return Store(fs, f"{bucket}/store")
    return Store.open(str(tmp_path / "shared") if request.param == "file" else f"memory://{tmp_path.name}")


def commit(attempt: Attempt, process: InThread) -> None:
    attempt.commit(metrics={"vocab_size": 512})


def never(attempt: Attempt, process: InThread) -> None:
    raise AssertionError("this run has nothing to do")


class Gate:
    """Work that begins, and goes on when it is let."""

    def __init__(self, then: Work) -> None:
        self.then = then
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self, attempt: Attempt, process: InThread) -> None:
        self.begun.set()
        while not (self.open.wait(0.01) or process.told.is_set()):
            continue
        self.then(attempt, process)


def plans(recipe: Path, store: Store) -> tuple[Plan, Plan]:
    return make(load(recipe, []), store), make(load(recipe, []), store)


def fail(attempt: Attempt, process: InThread) -> None:
    raise RuntimeError("a device fell off")


def test_one_works_and_the_other_waits_and_reuses(recipe: Path, shared: Store) -> None:
    one, other = plans(recipe, shared)
    gate = Gate(commit)
    first = Run(one, gate).start()
    first.until(gate.begun.is_set)
    second = Run(other, never).start()
    second.until(lambda: second.notes)
    assert second.notes[0].startswith(f"held by attempt {first.attempts[0].attempt} on ")
    assert second.notes[0].endswith(", waiting")
    gate.open.set()
    assert (first.wait().error, second.wait().error) == (None, None)
    assert (first.outcomes, second.outcomes) == (["finished"], ["reused"])
    assert len(second.notes) == 1


def test_runs_that_begin_at_the_same_moment_make_one_attempt(recipe: Path, shared: Store) -> None:
    runs = [Run(plan, commit) for plan in (*plans(recipe, shared), *plans(recipe, shared))]
    for run in runs:
        run.start()
    for run in runs:
        assert run.wait().error is None
    assert sum(len(run.attempts) for run in runs) == 1
    assert sorted(run.outcomes[0] for run in runs) == ["finished", "reused", "reused", "reused"]


def test_when_the_holder_fails_the_one_that_waits_takes_over(recipe: Path, shared: Store) -> None:
    one, other = plans(recipe, shared)
    gate = Gate(fail)
    first = Run(one, gate).start()
    first.until(gate.begun.is_set)
    second = Run(other, commit).start()
    second.until(lambda: second.notes)
    gate.open.set()
    assert isinstance(first.wait().error, StageFailed)
    assert second.wait().error is None
    assert second.outcomes == ["finished"]


def test_an_interrupted_holder_is_gone_on_from_where_it_committed(recipe: Path, store: Store) -> None:
    one, other = plans(recipe, store)

    def save(attempt: Attempt, process: InThread) -> None:
        store.write_once(f"{attempt.folder(Attempt.checkpoint_folder(5))}/weights", b"weights")
        attempt.commit_checkpoint(5, {}, files=sealed(attempt, 5))

    def go_on(attempt: Attempt, process: InThread) -> None:
        store.write_once(f"{attempt.folder(Attempt.checkpoint_folder(8))}/weights", b"weights")
        attempt.commit_checkpoint(8, {}, files=sealed(attempt, 8))
        attempt.commit(metrics={}, step=8)

    gate = Gate(save)
    first = Run(one, gate).start("pretrain/1")
    first.until(gate.begun.is_set)
    second = Run(other, go_on).start("pretrain/1")
    second.until(lambda: second.notes)
    first.stop("Ctrl-C")
    assert isinstance(first.wait().error, Interrupted)
    assert second.wait().error is None
    assert second.attempts[0].resume_step == 5


def test_waiting_ends_at_once_when_the_run_is_stopped(recipe: Path, store: Store) -> None:
    one, other = plans(recipe, store)
    gate = Gate(commit)
    first = Run(one, gate).start()
    first.until(gate.begun.is_set)
    second = Run(other, never, Timing(seconds=60.0, look=1000.0)).start()
    second.until(lambda: second.notes)
    second.stop("Ctrl-C")
    assert isinstance(second.wait().error, Interrupted)
    gate.open.set()
    assert first.wait().error is None


def test_a_run_that_lost_its_lease_stops_its_stage_and_attaches_to_the_new_holder(
    recipe: Path, shared: Store
) -> None:
    (plan, _), gate = plans(recipe, shared), Gate(never)
    woken = Run(plan, gate).start()
    woken.until(gate.begun.is_set)
    # while its machine slept, another one saw the lease run out
    path = plan.graph.nodes["tokenizer"].path
    taken = Leases(shared, path, QUICK).claim("other", Seen(woken.attempts[0].lease or 0, None, True))
    assert taken is not None
    with taken:
        woken.until(lambda: len(woken.notes) == 2)
        assert woken.notes[0].startswith("the lease was taken over by attempt other on ")
        assert woken.notes[1].startswith("held by attempt other on ")
        attempt = woken.attempts[0].model_copy(update={"attempt": "other", "lease": taken.generation})
        Attempt(attempt, shared).commit(metrics={})
    assert woken.wait().error is None
    assert woken.outcomes == ["reused"]
    assert len(woken.attempts) == 1
    assert Artifact(shared, path).manifest.attempt == "other"


def test_a_stage_that_finds_the_lease_lost_at_its_marker_commits_nothing(recipe: Path, store: Store) -> None:
    (plan, _), gate = plans(recipe, store), Gate(commit)
    sleepy = Run(plan, gate, Timing(seconds=600.0, look=0.02)).start()  # its beats are too rare to notice
    sleepy.until(gate.begun.is_set)
    path = plan.graph.nodes["tokenizer"].path
    taken = Leases(store, path, QUICK).claim("other", Seen(sleepy.attempts[0].lease or 0, None, True))
    assert taken is not None
    gate.open.set()
    sleepy.until(lambda: len(sleepy.notes) == 2)
    assert not Artifact(store, path).complete
    taken.release()
    assert sleepy.wait().error is None  # it takes over again, and is the one that commits
    assert [job.lease for job in sleepy.attempts] == [1, 3]


def test_the_launcher_beats_while_the_stage_works(recipe: Path, store: Store) -> None:
    one, other = plans(recipe, store)
    gate = Gate(commit)
    first = Run(one, gate, Timing(seconds=0.5)).start()
    first.until(gate.begun.is_set)
    second = Run(other, never).start()
    second.thread.join(1.5)  # three times the seconds of the lease
    assert second.attempts == []
    gate.open.set()
    assert first.wait().error is None
    assert second.wait().error is None


def test_plan_and_status_say_who_holds_a_part_and_write_nothing(recipe: Path, store: Store) -> None:
    one, _ = plans(recipe, store)
    gate = Gate(commit)
    first = Run(one, gate).start()
    first.until(gate.begun.is_set)
    before = sorted(store.fs.find(store.root))
    plan = make(load(recipe, []), store)
    assert plan.steps["tokenizer"].reason.startswith(f"held by attempt {first.attempts[0].attempt} on ")
    assert [part.state for part in planned_parts(plan).values()][:2] == ["held", "not run"]
    assert [name for name in sorted(store.fs.find(store.root)) if not name.endswith(".beat")] == [
        n for n in before if not n.endswith(".beat")
    ]
    gate.open.set()
    assert first.wait().error is None
    assert make(load(recipe, []), store).steps["tokenizer"].holder == ""
