"""Units without work, for measurements of who hands them out. `benchmarks.units` adds this module to the
stages, as a kind of part."""

from __future__ import annotations

from apertus_model.work.units import Result
from infra.store import Attempt


class Units:
    """As many as the spec of the part says; each leaves only its marker."""

    def __init__(self, attempt: Attempt) -> None:
        self.units = [f"{number:08d}" for number in range(attempt.job.spec["units"])]

    def run(self, key: str) -> Result:
        return Result({})
