"""The resolved part of best-fit packing. No stage of its own: a stage of training that packs its sequences resolves into one per corpus."""

from __future__ import annotations

from typing import ClassVar

from specs.base import identity
from specs.stages.base import Part


class PackingPart(Part):
    """Resolved. Input: `corpus`. The rows are a function of the documents and the sequence length alone."""

    PLAN_DEPENDS: ClassVar[bool] = True
    VERSION: ClassVar[int] = 1
    sequence_length: int = identity(ge=2)
