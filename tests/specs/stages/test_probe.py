"""`probe`: what it refuses before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.errors import SpecError
from specs.recipe import load
from specs.stages.probe import ProbeStage

RECIPE = f"""\
extends: {Path(__file__).parents[3] / "specs/recipes/smoke.yaml"}
name: probed
variables: {{none: null}}
stages:
  probe: {{kind: probe, from: pretrain, sources: [corpus/code], activations: true, sharpness: "${{none}}"}}
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.probe.activations=false", "the stage measures nothing; set sharpness or activations"),
        (
            "stages.probe.launch={processes: 2, parallel: {tp: 2}}",
            "stages.probe.launch.parallel.tp: 'probe' cannot divide layers (tp 2): the sparsity of",
        ),
    ],
)
def test_a_probe_that_cannot_measure_is_refused(tmp_path: Path, override: str, message: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    stage = load(recipe).stages["probe"]
    assert isinstance(stage, ProbeStage) and stage.sharpness is None and stage.activations
    with pytest.raises(SpecError) as caught:
        load(recipe, [override])
    assert message in str(caught.value)
