"""The whole recipe: sources, launch settings and named stages.

Invariant: a `Pipeline` that `specs.recipe.load` returns can be planned (`specs.checks`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field, PrivateAttr, StringConstraints

from specs.advice import Silenced
from specs.assumed_inputs import AssumedInputs
from specs.base import Spec, execution, location, reference
from specs.cluster import Cluster
from specs.compose import distinct
from specs.document import Document
from specs.errors import FieldPath, SpecError
from specs.figures import FigureSpec
from specs.launch import Launch, Retries
from specs.sources import SourceSpec
from specs.stages import STAGES
from specs.stages.base import Stage
from specs.tracking import Tracking

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
"""Name of a pipeline, source, stage or figure. Files are named after it, and filenames have at most 255
bytes."""
DEFAULT_STORE = "apertus-store"

if TYPE_CHECKING:
    AnyStage = Stage
else:
    _kinds = tuple(STAGES.values())
    AnyStage = Annotated[Union[_kinds], Field(discriminator="kind")]  # made from the registry  # noqa: UP007


class Pipeline(Spec):
    """A recipe. `stages` may be in any order; their references decide the order of execution."""

    name: Name = execution()
    description: str = execution("")
    store: str = location(
        DEFAULT_STORE,
        description="folder or fsspec URL of the artifact store, by default apertus-store in the current"
        " folder; --store and APERTUS_STORE win over it",
    )
    launch: Launch = execution(default_factory=Launch)
    retries: Retries = execution(default_factory=Retries)
    tracking: Tracking = execution(default_factory=Tracking)
    cluster: Cluster | None = execution(
        None, description="machines for which `plan` estimates hours, energy, cost and memory"
    )
    silence: Silenced = execution(
        default_factory=list,
        description="codes of advice (docs/advice.md) to leave out",
    )
    concurrency: int = execution(1, ge=1, le=1024, description="stages that may run at the same time")
    sources: dict[Name, SourceSpec] = reference(default_factory=dict)
    assumed_inputs: AssumedInputs = execution(
        default_factory=AssumedInputs,
        description="inputs that may be unavailable in a plan, beside declared sources",
    )
    stages: dict[Name, AnyStage] = reference(min_length=1)
    figures: dict[Name, FigureSpec] = execution(
        default_factory=dict, description="figures that the report draws from the results"
    )

    _document: Document | None = PrivateAttr(None)

    def where(self, path: FieldPath) -> str:
        """The file and line of a field; "" for a pipeline that was read from no file."""
        return "" if self._document is None else self._document.where(path)

    def located(self, error: SpecError) -> SpecError:
        """The same error, in which each problem has the file and line of its field, and one that the variants
        of a stage share is stated once."""
        problems = [
            replace(problem, where=problem.where or self.where(problem.path)) for problem in error.problems
        ]
        return SpecError(problems if self._document is None else distinct(self._document, problems))

    def family(self, stage: str) -> str:
        """The matrix stage that a stage is a variant of, or its own name if it is not a variant."""
        variants = self._document.variants if self._document is not None else {}
        return next((name for name, members in variants.items() if stage in members), stage)

    def launch_of(self, stage: Stage) -> Launch:
        """The stage's launch over the pipeline's, with the defaults filled in."""
        launch = stage.launch.over(self.launch)
        return launch.over(Launch(processes=1, threads=launch.cpu_threads))
