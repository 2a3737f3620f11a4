"""What `make test-latest` installs: every requirement of the tests, without the upper bounds of the pins."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tools.latest import differences, requirements

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
PINNED = PROJECT["tool"]["latest"]["pinned"]


def test_upper_bounds_go_but_those_with_a_reason() -> None:
    project = {
        "name": "apertus",
        "dependencies": ["torch==2.13.0", "fastapi<0.151", "a[x]<3,>=2", "kept==1"],
        "optional-dependencies": {
            "dev": ["pytest", "apertus[web,ray]"],
            "web": ["warcio"],
            "ray": ["ray==2"],
        },
    }
    assert [*requirements("", project, {"kept": "why"})] == ["torch>=2.13.0", "fastapi", "a[x]>=2", "kept==1"]
    assert [*requirements("dev", project, {})] == ["pytest", "warcio", "ray>=2"]


def test_every_pin_that_stays_is_a_requirement_with_a_bound() -> None:
    kept = [line for extra in ("", "dev") for line in requirements(extra, PROJECT["project"], PINNED)]
    assert [
        name for name in PINNED if not any(line.startswith((f"{name}=", f"{name}<")) for line in kept)
    ] == []
    assert [line for line in kept if "==" in line and line.split("==")[0] not in PINNED] == []


def test_versions_are_compared_by_canonical_name() -> None:
    pins = "# a comment\nlm_eval==0.4.13\ntorch==2.13.0\nabsent==1\n"
    assert [*differences(pins, {"lm-eval": "0.5", "torch": "2.13.0"})] == ["lm_eval 0.4.13 -> 0.5"]
