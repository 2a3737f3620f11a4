"""A kind of stage is three new files and no change of others: what recipes state, what it resolves into,
and its work. One that trains is the first file alone; with an objective of its own, that file beside it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

FILES = {
    "specs/stages/histogram.py": (
        '''
from typing import ClassVar, Literal
from specs.base import identity, reference
from specs.stages.base import Part, Stage
from specs.units import Reference

class HistogramStage(Stage):
    """Counts the tokens of a vocabulary by their length."""
    VERSION: ClassVar[int] = 1
    kind: Literal["histogram"] = identity()
    tokenizer: Reference = reference(to="tokenizer")
    longest: int = identity(8, ge=1)

class HistogramPart(Part):
    """Resolved. Input: `tokenizer`."""
    longest: int = identity()
'''
    ),
    "flows/planning/parts/histogram.py": (
        """
from specs.stages.histogram import HistogramPart

def add_histogram(builder, name, stage):
    inputs = {"tokenizer": builder.part(stage.tokenizer)}
    builder.node(name, name, HistogramPart(longest=stage.longest), inputs)
"""
    ),
    "apertus_model/stages/histogram.py": (
        """
from infra.store import Artifact
from specs.stages.histogram import HistogramPart

def run(attempt, progress, stop):
    part = HistogramPart.model_validate(attempt.job.spec)
    tokenizer = Artifact(attempt.store, attempt.job.inputs["tokenizer"].path)
    vocabulary = tokenizer.json("tokenizer.json")["model"]["vocab"]
    long = sum(len(token) >= part.longest for token in vocabulary)
    attempt.commit(metrics={"tokens": len(vocabulary), "long": long})
"""
    ),
}
TRAINING = {
    "specs/stages/polish.py": (
        '''
from typing import ClassVar, Literal
from specs.base import identity
from specs.settings import MixtureTraining
from specs.stages.training import CarryField, FromParent, Segment, carries

class PolishSegment(Segment):
    """Resolved."""
    shine: int = identity(3)

class PolishStage(FromParent, MixtureTraining):
    """Trains on."""
    VERSION: ClassVar[int] = 1
    SEGMENT = PolishSegment
    kind: Literal["polish"] = identity()
    carry: CarryField = carries("weights", "optimizer", "data")
'''
    )
}
LOSS = {
    "specs/stages/ipo.py": (
        '''
from typing import ClassVar, Literal
from specs.base import identity, reference
from specs.capabilities import OBJECTIVES, ObjectiveFacts
from specs.stages.dpo import DpoSegment, DpoStage
from specs.units import Reference

OBJECTIVES["ipo"] = ObjectiveFacts(rows="completions", recomputes_logits=True)

class IpoSegment(DpoSegment):
    """Resolved. Further input: `unit`."""
    OBJECTIVE: ClassVar[str] = "ipo"
    DATA_CLASS: ClassVar[str] = "apertus_model.trainer.objectives.ipo:IpoData"

class IpoStage(DpoStage):
    """Brings differences of log-ratios to one value (arXiv 2310.12036), in units that a corpus gives."""
    VERSION: ClassVar[int] = 1
    SEGMENT = IpoSegment
    INPUTS: ClassVar[dict[str, str]] = {"unit": "unit_of"}
    kind: Literal["ipo"] = identity()
    unit_of: Reference = reference(to="corpus")
'''
    ),
    "apertus_model/trainer/objectives/ipo.py": (
        """
from dataclasses import asdict
from types import SimpleNamespace
import numpy as np
import torch
from apertus_model.stages.training_data import PreferenceData
from apertus_model.trainer.objectives.preference import PreferenceObjective
from infra.store import Artifact

class IpoData(PreferenceData):
    def __init__(self, store, inputs, segment):
        super().__init__(store, inputs, segment)
        self.samples = InUnits(self.samples, Artifact.of_input(store, inputs["unit"]).metric("documents"))

class InUnits:
    def __init__(self, samples, unit):
        self.samples, self.epochs, self.unit = samples, samples.epochs, np.float32(unit)

    def __getitem__(self, index):
        return SimpleNamespace(**asdict(self.samples[index]), unit=self.unit)

class Ipo(PreferenceObjective):
    fields = (*PreferenceObjective.fields, "unit")

    def __init__(self, beta):
        self.beta = beta

    def count(self, labels, extras):
        present = extras["present"]
        return (present[:, 0::2] & present[:, 1::2]).double().sum()

    def losses(self, log_ratio, lengths, extras):
        present = extras["present"]
        difference = (log_ratio[:, 0::2] - log_ratio[:, 1::2]) / extras["unit"][:, None]
        losses = (difference - 1 / (2 * self.beta)).square()
        return torch.where(present[:, 0::2], losses, 0.0), torch.ones_like(log_ratio), {}

OBJECTIVES = {"ipo": lambda segment: Ipo(segment.loss.beta)}
"""
    ),
}
RECIPE = """
name: kinds
sources: {code: {url: "installed:stdlib", format: code, include: [json/*.py]}}
stages:
  lengths: {kind: histogram, tokenizer: words, longest: 5}
  words: {kind: tokenizer, sources: [code], vocab_size: 384, bytes_per_source: 20_000}
"""


TRAINING_RECIPE = """
name: trains
launch: {processes: 1, threads: 1, workers: {count: 1}}
sources: {code: {url: "installed:stdlib", format: code, include: [json/*.py]}}
stages:
  words: {kind: tokenizer, sources: [code], vocab_size: 384, bytes_per_source: 20_000}
  corpus: {kind: corpus, tokenizer: words, sources: {code: {holdout: 0.2}}}
  main: {kind: mixture, weights: {corpus/code: 1}, max_repetition: 20}
  pretrain:
    kind: pretrain
    model: {dim: 16, n_layers: 1, n_heads: 2, n_kv_heads: 1, head_dim: 8, ffn_dim: 32, vocab_size: 384}
    mixture: main
    sequence_length: 16
    global_batch_size: 2
    budget: 2 steps
    optimizer: {name: adamw, lr: 1e-3}
    precision: {param: float32}
  polish: {kind: polish, from: pretrain, mixture: main, budget: 3 steps}
"""


LOSS_RECIPE = (
    TRAINING_RECIPE.partition("  polish:")[0].replace("vocab_size: 384", "vocab_size: 512")
    + """
  chat: {kind: conversations, tokenizer: words, sources: {pairs: {holdout: 0}}}
  ipo:
    kind: ipo
    from: pretrain
    pairs: [chat]
    unit_of: corpus
    loss: {beta: 0.25}
    sequence_length: 512
    global_batch_size: 1
    budget: 1 steps
    optimizer: {name: adamw, lr: 1e-3}
"""
).replace("sources: {code:", "sources: {pairs: {url: pairs.jsonl, format: chat}, code:", 1)


class Apertus:
    """The command line of a copy of the product with further files."""

    def __init__(self, folder: Path, files: dict[str, str], recipe: str) -> None:
        self.folder, self.recipe = folder, folder / "kinds.yaml"
        for package in ("specs", "flows", "apertus_model", "infra"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, folder / "checkout" / package, ignore=ignored)
        for name, text in files.items():
            assert not (folder / "checkout" / name).exists()
            (folder / "checkout" / name).write_text(text)
        self.recipe.write_text(recipe)

    def __call__(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHONPATH": str(self.folder / "checkout"),
            "PREFECT_HOME": str(self.folder / "prefect"),
            "COLUMNS": "200",
        }
        line = [sys.executable, "-m", "flows.cli", command, str(self.recipe), *arguments]
        return subprocess.run(
            [*line, "--store", str(self.folder / "store")],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.mark.slow
def test_a_kind_of_three_files_is_checked_planned_run_and_reused(tmp_path: Path) -> None:
    apertus = Apertus(tmp_path, FILES, RECIPE)
    ran = apertus("run")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "All 2 parts of kinds are finished" in apertus("run").stdout
    status = json.loads(apertus("status", "--json").stdout)["parts"]
    lengths = next(part for part in status if part["name"] == "lengths")
    assert lengths["kind"] == "histogram" and lengths["metrics"]["tokens"] >= 384 - 1
    assert 0 < lengths["metrics"]["long"] < lengths["metrics"]["tokens"]
    assert apertus("plan", "--set", "stages.lengths.longest=0").returncode == 2
    refused = apertus("plan", "--set", "stages.lengths.tokenizer=lengths")
    assert "stage 'lengths' is a histogram; tokenizer is needed here" in refused.stderr


@pytest.mark.slow
def test_a_kind_that_trains_is_one_file(tmp_path: Path) -> None:
    apertus = Apertus(tmp_path, TRAINING, TRAINING_RECIPE)
    ran = apertus("run")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    status = json.loads(apertus("status", "--json").stdout)["parts"]
    polish = next(part for part in status if part["name"] == "polish")
    assert (polish["kind"], polish["state"], polish["steps"]) == ("polish", "finished", 3)
    changed = json.loads(apertus("plan", "--json", "--set", "stages.polish.budget=4 steps").stdout)
    actions = {stage["name"]: stage["action"] for stage in changed["stages"]}
    assert actions.pop("polish") == "resume" and set(actions.values()) == {"reuse"}


@pytest.mark.slow
def test_a_loss_with_an_input_of_its_own_is_two_files(tmp_path: Path) -> None:
    rows = [{"prompt": "A", "chosen": "B" * n, "rejected": "C"} for n in range(1, 5)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    apertus = Apertus(tmp_path, LOSS, LOSS_RECIPE)
    ran = apertus("run")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    status = json.loads(apertus("status", "--json").stdout)["parts"]
    trained = next(part for part in status if part["name"] == "ipo")
    assert (trained["kind"], trained["state"]) == ("ipo", "finished")
    # before the first update all log-ratios are 0, so each of the pairs has the loss (1 / (2 beta))^2
    assert trained["metrics"]["loss"] == pytest.approx(4.0)
    refused = apertus("plan", "--set", "stages.ipo.unit_of=words")
    assert "stage 'words' is a tokenizer; corpus is needed here" in refused.stderr
