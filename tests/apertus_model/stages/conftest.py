"""A trained segment."""

import pytest

from infra.store import Artifact
from tests.apertus_model.stages.training import SPEC, Stages


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def trained(stages: Stages) -> Artifact:
    return stages.train("trained", SPEC)
