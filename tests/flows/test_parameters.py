"""The parameters of a deployment take what the command line takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from flows.parameters import Override
from specs.document import Document, override
from specs.errors import SpecError

ROOT = Path(__file__).parents[2]
SHOWN = re.findall(r"--set (?:\"([^\"]+=[^\"]+)\"|([^\s`\"]+=[^\s`)]+))", (ROOT / "README.md").read_text())
ACCEPTED = ["stages.main.weights.corpus/code=3", "stages.pretrain.mixture.0 tokens=main", *("".join(pair) for pair in SHOWN)]
REFUSED = ["no value", "=3", "stages..budget=3 steps", ".name=x"]


@pytest.mark.parametrize("assignment", ACCEPTED)
def test_an_override_that_the_command_line_takes_is_a_parameter(assignment: str) -> None:
    stages = {name: {} for name in ("main", "pretrain", "cooldown", "align", "preferences", "sft", "other")}
    override(Document("a.yaml", {"stages": stages}, {}), assignment)
    assert TypeAdapter(Override).validate_python(assignment) == assignment


@pytest.mark.parametrize("assignment", REFUSED)
def test_what_is_no_assignment_is_refused_by_both(assignment: str) -> None:
    with pytest.raises(SpecError, match="is not an assignment"):
        override(Document("a.yaml", {"stages": {}}, {}), assignment)
    with pytest.raises(ValidationError):
        TypeAdapter(Override).validate_python(assignment)
