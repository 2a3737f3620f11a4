"""The classes that compute a model in transformers: for Apertus, those of transformers; for other models,
those of a file of this package that an export ships (`specs.hugging_face.own_class`).

Invariant: a folder with such a model is opened with the file of this package. The copy in the folder is never
run.
"""

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
    """The empty `KeysValues` of a forward pass of a layer schedule, without a cache."""
    from apertus_model.model.modeling_apertus_scheduled import KeysValues

    return KeysValues()


def classes_of(own: OwnClass) -> tuple[Any, Any]:
    """The classes of the config and of the model."""
    module = importlib.import_module(f"apertus_model.model.{own.module}")
    return getattr(module, own.config), getattr(module, own.model)


def register_own_classes() -> None:
    """Registers the classes of `OWN_CLASSES` with transformers, which then opens these models with them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for config, model in map(classes_of, OWN_CLASSES):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
