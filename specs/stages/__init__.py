"""The kinds of stages: each module of this folder that has a subclass of `Stage` with a `kind` adds it.

The rest of a kind is found by its name: `flows/planning/parts` has a function `add_<kind>`, and
`apertus_model/stages/<kind>.py`, or the training engine, does its work.
"""

import importlib
import pkgutil

from specs.stages.base import Stage
from specs.stages.training import Segment, TrainingStage


def _found() -> dict[str, type[Stage]]:
    """The classes of all kinds, in the order of their names."""
    kinds: dict[str, type[Stage]] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Stage) and (kind := value.kind_name()):
                kinds[kind] = value
    return dict(sorted(kinds.items()))


STAGES = _found()
_TRAINING = {kind: stage for kind, stage in STAGES.items() if issubclass(stage, TrainingStage)}
TRAINING = tuple(_TRAINING)
CHAT = tuple(kind for kind, stage in _TRAINING.items() if stage.CHAT)
CHECKPOINTS = tuple(kind for kind, stage in STAGES.items() if stage.result() == "checkpoint")


def segment_of(kind: str) -> type[Segment]:
    """The class of the segments of a kind that trains."""
    return _TRAINING[kind].SEGMENT
