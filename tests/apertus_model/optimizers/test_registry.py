"""Which optimizer a name stands for, and which parameters it decays."""

import re
from typing import get_args

import pytest

from apertus_model.model.model import model_config
from apertus_model.optimizers.registry import CONSTRUCTORS, NOT_DECAYED
from apertus_model.trainer.optimizer import optimizer_config
from specs.capabilities import OPTIMIZERS, OptimizerName
from specs.mamba import Mamba
from specs.optimizer import OptimizerSpec
from tests.apertus_model.harness import MODEL


def test_only_vectors_scalars_and_convolutions_are_spared_from_weight_decay() -> None:
    hybrid = MODEL.model_copy(update={"mamba": Mamba(layers=[0])})
    model = model_config(hybrid, sequence_length=16, attention="sdpa").build()
    for name, parameter in model.named_parameters():
        spared = parameter.ndim == 1 or ".conv_" in name
        assert (re.search(NOT_DECAYED, name) is not None) == spared, name


def test_every_name_of_the_spec_has_an_optimizer() -> None:
    assert list(CONSTRUCTORS) == list(OPTIMIZERS) == list(get_args(OptimizerName))
    for name in OPTIMIZERS:
        groups = optimizer_config(OptimizerSpec(name=name, lr=1e-3).resolved({})).param_groups
        assert {group.optimizer_name for group in groups} <= set(CONSTRUCTORS)


@pytest.mark.parametrize("gpu", [False, True])
def test_what_has_a_kernel_uses_it_exactly_on_a_gpu(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW also beside an optimizer of matrices. The others keep the implementation of the whole config."""
    monkeypatch.setattr("apertus_model.optimizers.registry.has_gpu", lambda: gpu)
    for name in OPTIMIZERS:
        config = optimizer_config(OptimizerSpec(name=name, lr=1e-3).resolved({}))
        assert config.implementation == "foreach"
        for group in config.param_groups:
            stated = {name: group.optimizer_kwargs.get(name) for name in ("fused", "foreach")}
            kernel = group.optimizer_name in ("adamw", "ademamix")
            assert stated == {"fused": gpu if kernel else None, "foreach": not gpu if kernel else None}
