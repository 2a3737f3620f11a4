"""Codes of advice are known by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specs.errors import SpecError
from specs.recipe import load
from tests.recipes import write_recipe


def test_an_unknown_code_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError,
        match=re.escape(
            "there is no code of advice 'learning-rate-jumps'; did you mean 'learning-rate-jump'?"
        ),
    ):
        load(write_recipe(tmp_path), ["stages.pretrain.silence=[learning-rate-jumps]"])
