"""The parameters of a deployment take what the command line takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter, ValidationError

from flows.execution.parameters import Override, StoreUrl
from specs.document import Document, override
from specs.errors import SpecError

ROOT = Path(__file__).parents[3]
SHOWN = re.findall(r"--set (?:\"([^\"]+=[^\"]+)\"|([^\s`\"]+=[^\s`)]+))", (ROOT / "README.md").read_text())
ACCEPTED = [
    "stages.main.weights.corpus/code=3",
    "stages.pretrain.mixture.0 tokens=main",
    *("".join(pair) for pair in SHOWN),
]
REFUSED = ["no value", "=3", "stages..budget=3 steps", ".name=x"]


@pytest.mark.parametrize("assignment", ACCEPTED)
def test_an_override_that_the_command_line_takes_is_a_parameter(assignment: str) -> None:
    stages = {name: {} for name in ("main", "pretrain", "cooldown", "align", "preferences", "sft", "warmer")}
    override(Document("a.yaml", {"stages": stages}, {}), assignment)
    assert TypeAdapter(Override).validate_python(assignment) == assignment


@pytest.mark.parametrize("assignment", REFUSED)
def test_what_is_no_assignment_is_refused_by_both(assignment: str) -> None:
    with pytest.raises(SpecError, match="is not an assignment"):
        override(Document("a.yaml", {"stages": {}}, {}), assignment)
    with pytest.raises(ValidationError):
        TypeAdapter(Override).validate_python(assignment)


@pytest.mark.parametrize("url", ["s3://k:s@h/b", "s3://k:a/s@h/b", "s3://k:a@s@h/b", "https://token@h/b"])
def test_the_form_refuses_credentials_in_a_url(url: str) -> None:
    assert not Draft202012Validator(TypeAdapter(StoreUrl).json_schema()).is_valid(url)
    assert not Draft202012Validator(TypeAdapter(Override).json_schema()).is_valid(f"store={url}")


@pytest.mark.parametrize(
    "url", ["/data/a@b", "s3://bucket/user@host/x", "folder", "http://host:9000/x", "file:///a:b@c"]
)
def test_the_form_takes_a_folder_or_url_without(url: str) -> None:
    assert Draft202012Validator(TypeAdapter(StoreUrl).json_schema()).is_valid(url)
    assert Draft202012Validator(TypeAdapter(Override).json_schema()).is_valid(f"store={url}")
