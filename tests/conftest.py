"""For all tests: servers of storage, what transformers logs, and what runs them ask for.

Hypothesis tries the same examples in every run, so that a red run is red again; HYPOTHESIS_PROFILE=random
looks for new ones.
"""

import os
import re
import signal
from collections.abc import Generator, Iterator
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch's default check makes CUDA unusable after a fork

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from infra.imports import quick_imports
from tests.infra.moto import Moto
from tests.infra.ray import little_ray
from tests.infra.swift import Swift, obstacle
from tests.numerics import numerics, pytest_sessionfinish
from tests.numerics import pytest_addoption as add_numerics

__all__ = ["numerics", "pytest_sessionfinish"]

RUNS = "tests/e2e/"
TRAININGS = "tests/apertus_model/trainer/"
ALONE = (
    "tests/infra/test_faults.py",
    "tests/flows/execution/test_rehearsal.py::test_what_is_shipped",
    "tests/infra/docker/test_image.py",
)
ENGINE = re.compile(r"tests/apertus_model/\w+/")

# A shell or `nohup` starts the tests with these ignored, which programs would inherit;
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)  # a handler they do not.

os.environ |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")  # servers of tests are here

# Several processes run tests: threads of one would wait, computing, for others that have no core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "100")  # a stage that a test runs here asks for two threads

if os.environ.get("TESTS_ON") != "gpu":  # `make gpu-check` sets it; all other tests compute on the CPU
    os.environ |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")

pytest.register_assert_rewrite(  # they assert for several files
    "tests.infra.maker",
    "tests.specs.composing",
    "tests.recipes",
    "tests.apertus_model.data.sources",
    "tests.apertus_model.trainer.layouts",
)

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_addoption(parser: pytest.Parser) -> None:
    add_numerics(parser)
    parser.addoption(
        "--crashes",
        action="store_true",
        help="write the kills of test_crashes.py into docs/crashes.json and docs/crashes.md",
    )
    parser.addoption(
        "--crash-seed", type=int, help="draw the moments and victims of test_crashes.py from this seed"
    )


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """For `-n`: whole runs go to one process, as they share a finished one. With slow ones they take hours,
    and each process makes a run to share. The tests of each part of the engine go to one process too, since
    they share processes that train. Of the rest, a file stays together, but for faults, rehearsals of shipped
    recipes and the image, which share nothing and take up to a quarter of an hour each."""
    with_slow = config.option.markexpr != "not slow"

    class Runs(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(RUNS) and not with_slow:
                return RUNS
            if nodeid.startswith(ALONE):
                return nodeid
            engine = ENGINE.match(nodeid)
            return engine[0] if engine else nodeid.split("::")[0]

        def remove_node(self, node: Any) -> str | None:
            """A test that ends its process is not run again: it would end a dozen more."""
            units = self.assigned_work[node].values()
            running = ((unit, test) for unit in units for test, done in unit.items() if not done)
            unit, ended = next(running, ({}, None))
            if ended is not None:
                unit[ended] = True
            super().remove_node(node)
            return ended

        def _assign_work_unit(self, node: Any) -> None:
            """A process begins a test when it knows the next one, so it gets units until it has two tests."""
            super()._assign_work_unit(node)
            if self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)

    config.option.loadscopereorder = False
    return Runs(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with quick_imports():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that processes end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith(TRAININGS),
            not item.nodeid.startswith(RUNS),
            not item.nodeid.startswith(ALONE),
            item.path not in slow,
        )
    )


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    server = Moto()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    folder = tmp_path_factory.mktemp("swift")
    if reason := obstacle(folder):
        pytest.skip(reason)
    server = Swift(folder)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The address of a Ray cluster of two nodes with one CPU each, and one that has none."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with little_ray(1, 1, 0) as cluster:
        yield cluster.address


@pytest.fixture
def transformers_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers logs at its usual level, that of warnings."""
    from transformers.utils import logging

    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    yield caplog
    logging.set_verbosity(before)
