"""A rank that hangs, in a run as a user starts it: every rank says where, the attempt ends, and the next
one goes on to the same bits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from infra.store import Artifact
from tests.e2e.conftest import SMOKE, Run
from tests.e2e.test_smoke import plan_of

TWO = "launch.processes=2"

HANGS_ONCE = """
import os, sys, threading, time
if os.environ.get("RANK") == "1" and not os.path.exists(os.environ["HUNG"]):
    def watch():
        while not hasattr(sys.modules.get("apertus_model.trainer.trainer"), "ApertusTrainer"):
            time.sleep(0.01)
        trainer = sys.modules["apertus_model.trainer.trainer"].ApertusTrainer
        step, made = trainer.train_step, []
        def hangs(self, batches):
            made.append(self.step)
            if len(made) == 7:
                open(os.environ["HUNG"], "w").close()
                time.sleep(3600)
            step(self, batches)
        trainer.train_step = hangs
    threading.Thread(target=watch, daemon=True).start()
"""


def cooled(finished: Path, home: Path, api: str, store: Path, *more: str) -> tuple[Run, Artifact]:
    """A run on two processes that has everything but the cooldown."""
    shutil.copytree(finished, store)
    shutil.rmtree(store / "cooldown")
    arguments = ["run", SMOKE, "--store", str(store), "--until", "cooldown"]
    run = Run(home, *arguments, overrides=[TWO, *more], api=api)
    assert run.wait() == 0, run.text
    node = plan_of(store, TWO).graph.nodes["cooldown"]
    return run, Artifact(plan_of(store).store, node.path, node.end_step)


def rows(artifact: Artifact) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in artifact.history() if "loss" in row]


def weights(artifact: Artifact) -> dict[str, str]:
    checkpoint = artifact.checkpoint(artifact.checkpoint_steps()[-1])
    return {
        name: record.sha256
        for name, record in checkpoint.marker.files.items()
        if name.endswith(".safetensors")
    }


@pytest.mark.slow
def test_the_run_of_a_rank_that_hangs_ends_in_the_bits_of_one_that_does_not(
    finished: Path, home: Path, api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = cooled(finished, home, api, tmp_path / "whole")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HANGS_ONCE)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("HUNG", str(tmp_path / "hung"))
    run, hung = cooled(finished, home, api, tmp_path / "hangs", "launch.hang_timeout=10s")
    assert (tmp_path / "hung").exists()
    assert "no step was made for longer than launch.hang_timeout" in run.text

    logs = sorted((Path(hung.store.full(hung.path)) / "logs").iterdir())
    assert len(logs) == 2, "the runner tried again, once"
    log = logs[0].read_text()
    first, second = log.split("stacks of rank 0:")[1].split("stacks of rank 1:")
    assert "in train_step" in first  # waits for the other one
    assert "in hangs" in second
    assert "stacks of rank" not in logs[1].read_text()

    assert rows(hung) == rows(whole)
    assert weights(hung) == weights(whole)
