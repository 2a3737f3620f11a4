"""Training on pairs of completions: what all such kinds share, and what `qrpo` and `dpo` share, which train
against a reference model.

A sample is a packed sequence of pairs; both completions of a pair lie in the same one. The batch counts
packed sequences.
"""

from __future__ import annotations

from specs.base import identity, reference
from specs.stages.sft import LinearSchedule
from specs.stages.training import CarryField, FromParent, Segment, Training, carries
from specs.units import OrRest, Reference


class PairTraining(FromParent, Training):
    """The loss of a pair needs whole sequences."""

    CHAT = True
    data_seed: int = identity(28, neutral=28, description="of the order of the sequences")
    schedule: OrRest[LinearSchedule] = identity(default_factory=LinearSchedule)

    @property
    def objective(self) -> str:
        return self.kind


class PreferenceTraining(PairTraining):
    """`from` is the model that the preference data were made with; `preferences` names the stage that made
    them, which also decides the sequence length."""

    carry: CarryField = carries("weights")
    preferences: Reference = reference(to="preference_data")


class PreferenceSegment(Segment):
    """Resolved. Inputs: `pairs`, `log_probabilities`, `tokenizer`, `parent`."""

    data_seed: int = identity(28, neutral=28)
