"""Clocks that jump in the middle of a run, or are wrong: no duration changes, and nothing young goes."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from infra.store import Store, StoreError
from infra.store.maintenance.garbage import remove, survey
from infra.store.reading.walk import list_files
from infra.store.writing.lease import Lease, Leases, Timing
from tests.e2e.conftest import ROOT
from tests.infra.launchers.test_local import Script
from tests.infra.maker import Maker

DAY = 86_400.0
jumps = pytest.mark.parametrize("jump", [DAY, -DAY], ids=["forwards", "backwards"])
# Moments, not durations: for people and for names that sort; the age of files; the end of a job, which the
# cluster states; and start-up, which begins in another process, perhaps on another machine.
WALL_CLOCK = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
READS_THE_WALL_CLOCK = {
    "apertus_model/server_client.py": 1,  # a server may state until when to wait
    "apertus_model/stop.py": 1,
    "apertus_model/tracking.py": 2,
    "apertus_model/trainer/metrics.py": 1,
    "flows/cli/commands/run.py": 1,
    "flows/execution/flow.py": 1,
    "flows/execution/runner.py": 2,
    "infra/store/reading/artifact.py": 1,
    "infra/store/writing/attempt.py": 2,
    "infra/store/maintenance/garbage.py": 1,
    "infra/store/writing/lease.py": 1,
    "infra/store/runs.py": 1,
}


def make_jump(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store"))
    opened.initialise()
    return opened


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are those of another machine."""
    monkeypatch.setattr("infra.liveness.machine", lambda: ("", ""))


@pytest.fixture
def maker(store: Store, tmp_path: Path) -> Maker:
    return Maker(store, tmp_path / "scratch")


def test_only_these_read_the_wall_clock() -> None:
    found: dict[str, int] = {}
    for folder in ("specs", "flows", "apertus_model", "infra"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text()))
            calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
            if count := sum(call in WALL_CLOCK for call in calls):
                found[str(path.relative_to(ROOT))] = count
    assert found == READS_THE_WALL_CLOCK


@jumps
def test_an_attempt_took_what_passed(maker: Maker, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    attempt = maker.attempt("corpus", "a", launched_at=time.time() - 5)
    begun = time.monotonic()
    time.sleep(0.05)
    make_jump(monkeypatch, jump)
    seconds = attempt.seconds()
    assert 5 <= seconds.startup < 60
    assert 0.05 <= round(seconds.compute + seconds.storage, 3) <= time.monotonic() - begun + 60


def test_a_launcher_whose_clock_is_ahead_takes_no_time_from_an_attempt(maker: Maker) -> None:
    assert maker.attempt("corpus", "a", launched_at=time.time() + DAY).seconds().startup == 0


@jumps
def test_a_time_limit_is_a_stopwatchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    stage = Script(tmp_path, "import time; time.sleep(0.3); print('done')", time_limit="1h")
    ended = stage.run(lambda line: None, lambda row: None, lambda pipe: make_jump(monkeypatch, jump))
    assert (ended.code, ended.stopped, ended.tail) == (0, "", ("done",))


@jumps
@pytest.mark.usefixtures("elsewhere")
def test_a_holder_stays(store: Store, maker: Maker, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Seen from another machine, which judges by the counter and its own stopwatch."""
    passed = [0.0]
    leases = Leases(store, maker.data("corpus", "a"), Timing(seconds=60, clock=lambda: passed[0]))
    lease = leases.claim("holder", leases.look())
    assert isinstance(lease, Lease)
    lease.beat()
    assert not leases.look().free
    make_jump(monkeypatch, jump)
    for _ in range(10):
        passed[0] += 6
        assert not leases.look().free
    passed[0] += 6
    assert leases.look().why == "no heartbeat for 60 s"


def test_what_this_machine_works_at_stays_though_its_files_look_old(store: Store, maker: Maker) -> None:
    """After a jump of two days; a moment later its next beat is young again."""
    parent = maker.training("a", [10], [10])
    leases = Leases(store, maker.attempt("pretrain", "b", (parent, 10)).job.path)
    lease = leases.claim("holder", leases.look())
    assert lease is not None
    assert survey(store, now=time.time() + 2 * DAY).items == []
    lease.release()
    assert {item.path for item in survey(store, now=time.time() + 2 * DAY).items} == {parent, lease.path}


def test_nothing_goes_while_this_machines_clock_is_ahead_of_the_storages(store: Store, maker: Maker) -> None:
    maker.data("corpus", "a")
    before = list_files(store)
    found = survey(store, now=time.time() + 2 * DAY)
    assert len(found.items) == 1
    with pytest.raises(StoreError, match=r"clock is 172,\d{3} s ahead .* nothing was removed"):
        remove(store, found, clock=lambda: time.time() + 2 * DAY)
    assert list_files(store) == before


@pytest.mark.parametrize("ahead", [300.0, 0.0, -DAY])
def test_a_clock_that_is_right_or_behind_is_no_hindrance(store: Store, maker: Maker, ahead: float) -> None:
    maker.data("corpus", "a")
    assert remove(store, survey(store, now=time.time() + 2 * DAY), clock=lambda: time.time() + ahead) > 0
    assert list(list_files(store)) == ["format.json"]


def test_what_seems_to_come_from_the_future_stays(store: Store, maker: Maker) -> None:
    maker.data("corpus", "a")
    assert survey(store, now=time.time() - DAY).items == []
