"""The objectives that a step minimises. Each module of this folder has `OBJECTIVES`: by name, what makes an
objective of a segment; `specs.capabilities` states what is known of each."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from apertus_model.trainer.objectives.base import Objective

OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    name: make
    for module in pkgutil.iter_modules(__path__, f"{__name__}.")
    for name, make in getattr(importlib.import_module(module.name), "OBJECTIVES", {}).items()
}


def objective_of(segment: Any) -> Objective:
    """The objective that a segment names."""
    return OBJECTIVES[segment.objective](segment)
