"""The base classes of all stages, as written in the YAML and as resolved by the planner.

A *stage* is what a recipe names. The planner resolves it into one or more *parts* (a corpus has one per
source, a training stage one per segment); a part is a pure function of its spec and its inputs, and has a
fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator

from specs.advice import Silenced
from specs.base import Spec, execution, identity, reference
from specs.errors import FieldPath, Problem
from specs.launch import HeldModel, Launch
from specs.published import PublishedScore
from specs.settings import Phase
from specs.sources import TOKENISED, SourceSpec
from specs.units import Reference


def _different(references: list[Reference]) -> list[Reference]:
    if len(set(map(str, references))) < len(references):
        raise ValueError("a part is repeated; name it once")
    return references


DifferentReferences = Annotated[list[Reference], AfterValidator(_different)]


class Stage(Spec):
    """Fields of every stage. `kind` chooses the class; each class states it as a Literal."""

    VERSION: ClassVar[int]  # raised when results change
    RESULT: ClassVar[str] = ""
    MEASURES_LOSS: ClassVar[bool] = False  # whether its checkpoints have held-out losses
    IN_LAYOUT: ClassVar[bool] = False  # whether `launch.parallel` spreads its model over processes
    READS: ClassVar[Literal["text", "conversations"]] = "text"  # the content of its sources
    CONTINUED_BY: ClassVar[str] = ""  # the kind of stage that trains on from it; its own by default
    PART_PER_SOURCE: ClassVar[bool] = False  # whether references name its parts, `<stage>/<source>`
    kind: str = identity()
    after: list[str] = execution(
        default_factory=list,
        description="stages that must finish, and pass their gates, before this one",
    )
    launch: Launch = execution(default_factory=Launch)
    protect: bool = execution(
        False,
        description="a change never reruns the finished stage: the plan refuses and says what changed",
    )
    silence: Silenced = execution(
        default_factory=list,
        description="codes of advice (docs/advice.md) to leave out for this stage",
    )
    description: str = execution("")

    @classmethod
    def kind_name(cls) -> str:
        """The kind as recipes name it; "" for a base class."""
        return next(iter(get_args(cls.model_fields["kind"].annotation)), "")

    @classmethod
    def result(cls) -> str:
        """The result of the stage for references (`reference(to=...)`): `checkpoint`, or the name of its
        kind."""
        return cls.RESULT or cls.kind_name()

    def source_fields(self) -> dict[str, FieldPath]:
        """The entries of `sources:` that the stage reads, each with the path, in the stage, of the field that
        names it."""
        return {}

    def source_problems(self, name: str, source: SourceSpec, at: FieldPath) -> Iterator[Problem]:
        """Why the stage cannot read the entry `name` of `sources:`, which the field `at` names."""
        yield from ()

    def part_problems(self, at: FieldPath, part: Reference, of: Stage) -> Iterator[Problem]:
        """Why the stage cannot read a part of another stage, which exists and is of the right kind. `at`: the
        field that names it."""
        yield from ()

    def field_problems(self, at: FieldPath) -> Iterator[Problem]:
        """What is wrong with a single field of the stage, whose path is `at`."""
        yield from ()

    def phases(self, name: str) -> list[Phase]:
        """The phases of training of the stage, called `name` in the recipe, in order."""
        return []

    @property
    def annealed(self) -> bool:
        """Whether it is a mixture whose shares change during training."""
        return False

    @property
    def excluded_stages(self) -> list[str]:
        """The names of stages whose samples are not drawn again."""
        return []

    def chooses_by_loss(self, checkpoint: Reference) -> bool:
        """Whether the stage needs the held-out losses of a checkpoint that it names."""
        return checkpoint.best is not None

    @property
    def objective(self) -> str:
        """What its training minimises, which some optimizers cannot (`specs.optimizer.refusals`); "" without
        training."""
        return ""

    @property
    def read_model(self) -> Reference | None:
        """The checkpoint whose model `launch.parallel` spreads, if the stage does not train."""
        return None

    @property
    def teacher_model(self) -> Reference | None:
        """The checkpoint of a second model, which is held beside that of the stage."""
        return None

    def published_scores(self) -> dict[str, PublishedScore]:
        """The published scores that the recipe states, by metric of the part of the stage's own kind."""
        return {}

    def obstacle(self, to: Literal["pp", "tp", "cp", "float8"]) -> str:
        """Why a pipeline or tensor parallelism cannot divide the model of the stage, context parallelism
        cannot divide its sequences, or its linear layers cannot multiply in float8; "" if they can."""
        return "it needs the logits on every process" if to == "pp" else ""


def only_text(stage: Stage, name: str, source: SourceSpec, at: FieldPath) -> Iterator[Problem]:
    """The problem of a stage that is trained on text, if a source has tokens instead."""
    if source.format in TOKENISED:
        message = f"source '{name}' is already tokenised; a {stage.kind} is trained on text"
        yield Problem(at, message, "name another source.")


class Part(Spec):
    """A resolved part of a stage. Its result depends on this spec and on its inputs, and on nothing else."""

    VERSION: ClassVar[int]  # only where the kind of the part is not a kind of stage
    # whether it runs on the training engine, with as many processes as its launch settings say
    ON_ENGINE: ClassVar[bool] = False
    # processes that share its units on a machine without GPUs; 0: its work is not cut into units
    WORKERS: ClassVar[int] = 0
    # the field whose settings say which whole model each worker holds, if they alone decide
    HELD_BY: ClassVar[str] = ""
    # whether it is made of several checkpoints, or is one of them
    OF_CHECKPOINTS: ClassVar[bool] = False
    # whether plans depend on its result (sizes, tokenizers, choices), so that a run plans again after it
    PLAN_DEPENDS: ClassVar[bool] = False

    @property
    def held_model(self) -> HeldModel | None:
        """The whole model that each worker holds; None if there is none, or if a server holds it."""
        held: HeldModel | None = getattr(self, self.HELD_BY).held_model if self.HELD_BY else None
        return held

    def gpus_of_worker(self, launch: Launch) -> int:
        """GPUs of each worker; 0 without a whole model. (Each process of torchrun has one GPU.)"""
        held = self.held_model
        return 0 if held is None else launch.tensor_parallel if held.shared else 1


class DocumentsPart(Part):
    """A part that reads the files of one source, in restartable tasks. Input: `documents`."""

    source: SourceSpec = identity()
    files_per_task: int = execution()
    listing: list[str] = execution(
        default_factory=list, description="the files, relative to the url, sorted; the planner fills it in"
    )


class SourcePart(DocumentsPart):
    """A part that is made of one source. Further input: `tokenizer`."""

    WORKERS: ClassVar[int] = 2
    process: Spec = identity()
    seed: int = identity()


class FromCheckpoint(Stage):
    """A stage that reads a checkpoint: `from: pretrain`, `from: pretrain@step=1200`, `from:
    pretrain@tokens=7.0T`; or a Hugging Face model: `from: hf:<folder or id>`."""

    from_: Reference = reference(alias="from", to="checkpoint")

    @property
    def read_model(self) -> Reference:
        return self.from_


class Weight(Spec):
    """One source of a mixture."""

    weight: float = execution(
        gt=0,
        description="share, relative to the other weights; under `proportional` a factor on the source's"
        " size",
    )
    max_repetition: float | None = execution(
        None,
        gt=0,
        description="allowed passes over the source; for a mixture, over each of its sources",
    )


def _weight(value: Any) -> Any:
    if value == 0 or (isinstance(value, dict) and value.get("weight") == 0):
        raise ValueError("a weight of 0 draws nothing; leave the source out")
    return (
        {"weight": value} if isinstance(value, (int, float, str)) and not isinstance(value, bool) else value
    )


WeightField = Annotated[Weight, BeforeValidator(_weight, json_schema_input_type=float | Weight)]
