"""`apertus plan`: two recipes beside each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from infra.store import Store
from tests.recipes import write_recipe


def test_the_command_compares_two_recipes(tmp_path: Path, store: Store) -> None:
    recipe = write_recipe(tmp_path)
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace("budget: 6 steps", "budget: 9 steps"))
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "plan",
        str(recipe),
        "--against",
        str(other),
        "--store",
        store.url,
        "--json",
    ]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["fields"]["stages.cooldown.budget"] == {"against": "9 steps", "this": "6 steps"}
