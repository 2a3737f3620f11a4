"""The classes that compute a model in transformers: its own of Apertus; of another model, those of a file
here that an export ships (`specs.hugging_face.own_class`).

Invariant: a folder with such a model is opened by the file of this package. The copy in the folder is never
run.
"""

from __future__ import annotations

import importlib
from typing import Any

from specs.hugging_face import OWN_CLASSES, OwnClass, architecture, own_class
from specs.model import ModelSpec


def config_class(spec: ModelSpec) -> Any:
    """The class of a model's config."""
    from transformers import ApertusConfig

    own = own_class(spec)
    return ApertusConfig if own is None else classes_of(own)[0]


def model_class(spec: ModelSpec) -> Any:
    """The class that computes a model."""
    import transformers

    own = own_class(spec)
    return getattr(transformers, architecture(spec)) if own is None else classes_of(own)[1]


def keys_values() -> Any:
    """What a forward pass of a layer schedule keeps for attention, without a cache."""
    from apertus_model.model.modeling_apertus_scheduled import KeysValues

    return KeysValues()


def classes_of(own: OwnClass) -> tuple[Any, Any]:
    """Config and model."""
    module = importlib.import_module(f"apertus_model.model.{own.module}")
    return getattr(module, own.config), getattr(module, own.model)


def register_own_classes() -> None:
    """Tells transformers to open folders of such models by the classes of this package."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for config, model in map(classes_of, OWN_CLASSES):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
