"""A kind of stage is three new files and no change of others: what recipes state, what it resolves into,
and its work."""

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

def add_histogram(builder, name):
    stage = builder.pipeline.stages[name]
    inputs = {"tokenizer": builder.part(stage.tokenizer)}
    builder.node(name, name, HistogramPart(longest=stage.longest), inputs)
"""
    ),
    "apertus_model/stages/histogram.py": (
        """
from infra.store import Artifact
from specs.stages.histogram import HistogramPart

def run(job, attempt, progress, stop):
    part = HistogramPart.model_validate(job.spec)
    tokenizer = Artifact(attempt.store, job.inputs["tokenizer"].path)
    vocabulary = tokenizer.json("tokenizer.json")["model"]["vocab"]
    long = sum(len(token) >= part.longest for token in vocabulary)
    attempt.commit(metrics={"tokens": len(vocabulary), "long": long})
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


@pytest.mark.slow
def test_a_kind_of_three_files_is_checked_planned_run_and_reused(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in ("specs", "flows", "apertus_model", "infra"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        assert not (checkout / name).exists()
        (checkout / name).write_text(text)
    recipe = tmp_path / "kinds.yaml"
    recipe.write_text(RECIPE)

    def apertus(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHONPATH": str(checkout),
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "COLUMNS": "200",
        }
        command = [sys.executable, "-m", "flows.cli", *arguments, "--store", str(tmp_path / "store")]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    ran = apertus("run", str(recipe))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    again = apertus("run", str(recipe))
    assert "All 2 parts of kinds are finished" in again.stdout
    status = json.loads(apertus("status", str(recipe), "--json").stdout)["parts"]
    lengths = next(part for part in status if part["name"] == "lengths")
    assert lengths["kind"] == "histogram" and lengths["metrics"]["tokens"] >= 384 - 1
    assert 0 < lengths["metrics"]["long"] < lengths["metrics"]["tokens"]
    assert apertus("plan", str(recipe), "--set", "stages.lengths.longest=0").returncode == 2
    refused = apertus("plan", str(recipe), "--set", "stages.lengths.tokenizer=lengths")
    assert "stage 'lengths' is a histogram; tokenizer is needed here" in refused.stderr
