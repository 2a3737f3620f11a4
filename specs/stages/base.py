"""What all stages share, as written in the YAML and as resolved by the planner.

A *stage* is what a recipe names. The planner resolves it into one or more *parts* (a corpus has one per source, a training stage one per
segment); a part is a pure function of its spec and its inputs, and is what has a fingerprint.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, get_args

from pydantic import BeforeValidator

from specs.advice import Silenced
from specs.base import Spec, execution, identity, reference
from specs.launch import Launch
from specs.units import Reference


class Stage(Spec):
    """Fields of every stage. `kind` chooses the class; each class states it as a Literal. `VERSION` is raised when results change."""

    VERSION: ClassVar[int]
    RESULT: ClassVar[str] = ""
    kind: str = identity()
    after: list[str] = execution(
        default_factory=list, description="stages that must have finished, and passed their gates, before this one"
    )
    launch: Launch = execution(default_factory=Launch)
    protect: bool = execution(False, description="a finished stage is never rerun by a change: the plan refuses and says what changed")
    silence: Silenced = execution(default_factory=list, description="codes of advice (docs/advice.md) that is not to be given here")
    description: str = execution("")

    @classmethod
    def kind_name(cls) -> str:
        """The kind as recipes name it; "" for a class that only others are made from."""
        return next(iter(get_args(cls.model_fields["kind"].annotation)), "")

    @classmethod
    def result(cls) -> str:
        """What the stage makes, as others may name it (`reference(to=...)`): a checkpoint, or what its kind is called."""
        return cls.RESULT or cls.kind_name()


class Part(Spec):
    """What a stage resolves into: with its inputs, all that its result depends on. `VERSION` stands here where the kind of the part is
    no kind of stage."""

    VERSION: ClassVar[int]
    ON_ENGINE: ClassVar[bool] = False  # it runs on the training engine, with as many processes as its launch settings say
    PLAN_DEPENDS: ClassVar[bool] = False  # on what it comes to: sizes, tokenizers, choices; a run plans again when it has finished


class FromCheckpoint(Stage):
    """A stage that reads a checkpoint: `from: pretrain`, `from: pretrain@step=1200`, `from: pretrain@tokens=7.0T`; or a Hugging Face model:
    `from: hf:<folder or id>`."""

    from_: Reference = reference(alias="from", to="checkpoint")


class Weight(Spec):
    """Share of one source in a mixture, relative to the others' weights; under `proportional` a factor of its size."""

    weight: float = execution(gt=0)
    max_repetition: float | None = execution(
        None, gt=0, description="passes over the source that are allowed; beside another mixture, over each of its sources"
    )


def _weight(value: Any) -> Any:
    if value == 0 or (isinstance(value, dict) and value.get("weight") == 0):
        raise ValueError("a weight of 0 draws nothing; leave the source out")
    return {"weight": value} if isinstance(value, (int, float, str)) and not isinstance(value, bool) else value


WeightField = Annotated[Weight, BeforeValidator(_weight, json_schema_input_type=float | Weight)]
