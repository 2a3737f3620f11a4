"""The resolved part of best-fit packing: a training stage with `packing: best-fit` has one per corpus."""

from __future__ import annotations

from typing import ClassVar

from specs.base import identity
from specs.stages.base import Part


class PackingPart(Part):
    """The resolved packing of a corpus. Input: `corpus`. The rows are a function of the documents and the
    sequence length alone."""

    PLAN_DEPENDS: ClassVar[bool] = True
    VERSION: ClassVar[int] = 1
    sequence_length: int = identity(ge=2)
