"""A segment of training of a published size."""

from __future__ import annotations

from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule
from specs.stages.training import Segment


def segment(flavour: str = "8b", **changes: object) -> Segment:
    fields: dict[str, object] = {
        "model": ModelSpec(flavour=flavour),
        "sequence_length": 4096,
        "global_batch_size": 2048,
        "optimizer": OptimizerSpec(lr=1e-4).resolved({}),
        "schedule": Schedule(),
        "end_step": 1000,
    }
    return Segment.model_validate({**fields, **changes})
