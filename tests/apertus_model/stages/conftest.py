"""A trained segment, and parallel text."""

from pathlib import Path
from typing import Any

import pytest

from infra.store import Artifact
from tests.apertus_model.stages.training import SPEC, Stages

PARALLEL = {
    "en": ["the number is one", "the number is two", "some other words"],
    "de": ["die Zahl ist eins", "die Zahl ist zwei", "einige andere Wörter"],
    "ja": ["数字は一です", "数字は二です", "他の言葉"],
}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def trained(stages: Stages) -> Artifact:
    return stages.train("trained", SPEC)


@pytest.fixture
def text(bench: Any, tmp_path: Path) -> Artifact:
    folder = tmp_path / "dev"
    folder.mkdir()
    for language, lines in PARALLEL.items():
        (folder / f"{language}.txt").write_text("\n".join(lines) + "\n")
    source = {"url": str(folder), "format": "text"}
    spec = {"sources": [source], "language_column": "language", "languages": [], "lines": None}
    return bench.run("parallel_text", "text", {**spec, "incomplete": "refuse"})
