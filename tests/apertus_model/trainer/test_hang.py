"""A rank that hangs: every rank says where, the attempt ends, and the next one goes on to the same weights.

Real processes, started as a run starts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def test_a_process_that_shows_no_sign_of_life_leaves_its_stacks_and_ends(tmp_path: Path) -> None:
    program = """
import signal, sys, threading, time
import apertus_model.trainer.hang as hang
hang.GRACE_SECONDS = 1.0
watch = hang.HangWatch(sys.argv[1], 3, 0.5)
watch.alive()
def waits_for_ever():
    threading.Event().wait()
threading.Thread(target=waits_for_ever, daemon=True).start()
def stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    while True: time.sleep(1)
stuck()
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert ended.returncode == -signal.SIGALRM
    stacks = (tmp_path / "stacks-3.txt").read_text()
    assert "in stuck" in stacks
    assert "in waits_for_ever" in stacks


def test_signs_of_life_postpone_the_end_and_the_last_one_cancels_it(tmp_path: Path) -> None:
    program = """
import sys, time
import apertus_model.trainer.hang as hang
hang.GRACE_SECONDS = 0.5
watch = hang.HangWatch(sys.argv[1], 0, 1.0)
for _ in range(5):
    watch.alive()
    time.sleep(0.5)
watch.alive()
time.sleep(1.2)  # slow, but not for ever
watch.alive()
watch.close()
time.sleep(2)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert ended.returncode == 0
    assert (tmp_path / "stacks-0.txt").read_text() == ""


SITE = """
import os, threading, time
if os.environ.get("RANK") == "1" and not os.path.exists(os.environ["HUNG"]):
    def watch():
        import sys
        while not hasattr(sys.modules.get("apertus_model.trainer.trainer"), "ApertusTrainer"):
            time.sleep(0.01)
        trainer = sys.modules["apertus_model.trainer.trainer"].ApertusTrainer
        step = trainer.train_step
        def hangs(self, batches):
            if self.step == 5:
                open(os.environ["HUNG"], "w").close()
                time.sleep(3600)
            step(self, batches)
        trainer.train_step = hangs
    threading.Thread(target=watch, daemon=True).start()
"""


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_attempt_and_the_next_one_makes_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.path.insert(0, str(TESTS / "stages"))
    from test_training_stages import SPEC, Stages, weights_of

    from infra.launchers.local import Ended, Process
    from infra.store import Artifact
    from specs.job import Job
    from specs.launch import Launch

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    stages = Stages(tmp_path)
    launch = Launch.model_validate({"processes": 2, "threads": 1, "hang_timeout": "10s"})
    lines: list[str] = []

    def go(name: str, attempt: str, **fields: Any) -> tuple[Ended, Job]:
        job = stages.job(
            *("pretrain", name, SPEC.model_dump(mode="json")),
            attempt=attempt,
            inputs={"mixture": stages.ref("mixture/mixture")},
            **{**fields, "launch": launch.model_dump(mode="json")},
        )
        return Process(job, launch, distributed=True).run(lines.append, lambda row: None), job

    monkeypatch.setenv("HUNG", str(tmp_path / "hung"))
    ended, job = go("hangs", "first")
    assert (tmp_path / "hung").exists()
    assert "no step was made for longer than launch.hang_timeout" in ended.stopped
    log = (Path(job.scratch) / "log.txt").read_text()
    assert lines[-1] in log
    first, second = log.split("stacks of rank 0:")[1].split("stacks of rank 1:")
    assert "in train_step" in first  # waits for the other one
    assert "in hangs" in second
    artifact = Artifact(stages.store, "pretrain/hangs", 6)
    assert not artifact.complete
    assert artifact.checkpoint_steps() == [3]
    ended, _ = go("hangs", "second", resume_step=3)
    assert (ended.code, ended.stopped) == (0, ""), lines
    go("whole", "first")
    assert weights_of(artifact, 6) == weights_of(Artifact(stages.store, "pretrain/whole"), 6)
