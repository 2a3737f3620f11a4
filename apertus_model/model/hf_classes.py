"""The classes that compute a model in transformers: its own of Apertus; of a model that is no plain stack,
those of `modeling_apertus_scheduled.py`, which an export ships.

Invariant: a folder with such a model is opened by the file of this package. The copy in the folder is never
run.
"""

from __future__ import annotations

from typing import Any

from specs.hugging_face import architecture
from specs.model import ModelSpec


def config_class(spec: ModelSpec) -> Any:
    """The class of a model's config."""
    from transformers import ApertusConfig

    return ApertusConfig if spec.plain_stack else scheduled_classes()[0]


def model_class(spec: ModelSpec) -> Any:
    """The class that computes a model."""
    import transformers

    return getattr(transformers, architecture(spec)) if spec.plain_stack else scheduled_classes()[1]


def keys_values() -> Any:
    """What a forward pass of a layer schedule keeps for attention, without a cache."""
    from apertus_model.model.modeling_apertus_scheduled import KeysValues

    return KeysValues()


def scheduled_classes() -> tuple[Any, Any]:
    """Config and model of a layer schedule. Tells transformers to open folders of such models by them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from apertus_model.model.modeling_apertus_scheduled import (
        ScheduledApertusConfig,
        ScheduledApertusForCausalLM,
    )

    AutoConfig.register(ScheduledApertusConfig.model_type, ScheduledApertusConfig, exist_ok=True)
    AutoModelForCausalLM.register(ScheduledApertusConfig, ScheduledApertusForCausalLM, exist_ok=True)
    return ScheduledApertusConfig, ScheduledApertusForCausalLM
