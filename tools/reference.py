"""The reference of a pipeline file as Markdown, made from the models; checked in as `docs/recipe.md`.

Invariant: what the page says of a field is what the model says: type, default, role and description.
"""

from __future__ import annotations

import json
from collections.abc import Container
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator
from pydantic_core import PydanticUndefined

from specs.anomalies import Anomalies
from specs.assumed_inputs import AssumedInputs, DeclaredModel
from specs.base import role_of
from specs.cluster import Cluster
from specs.figures import Axis, FigureSpec
from specs.filters import FilterSpec
from specs.launch import Checkpointing, Launch, Parallel, Retries, SlurmTask, Validation
from specs.model import ModelSpec, RopeScaling
from specs.optimizer import PUBLISHED, OptimizerSpec
from specs.pipeline import Pipeline
from specs.rewards import RewardSpec
from specs.schedule import ScheduleSpec
from specs.sources import Declared, SourceSpec
from specs.stages import STAGES
from specs.stages.base import Stage, Weight
from specs.stages.conversations import ConversationSource
from specs.stages.corpus import CorpusSource, Repeats
from specs.stages.dpo import DpoLoss
from specs.stages.evaluate import ByPosition, Gate, Generation, Harness, Memorisation
from specs.stages.long_context import LongContextStep
from specs.stages.mixture import Anneal
from specs.stages.preference_data import Sampling
from specs.stages.probe import Sharpness
from specs.stages.qrpo import QrpoLoss
from specs.stages.sft import Lora
from specs.stages.training import Goldfish, Precision

INTRODUCTION = """\
# The fields of a pipeline file

Made from the models (`python -m tools.reference > docs/recipe.md`); the same is in `specs/pipeline.schema.json` for editors.

The role of a field says what a change of it does. **identity**: it changes the result, so the stage and what follows it run again.
**execution**: it says where or how; recorded, and nothing runs again. **reference**: it names sources or other stages; what counts is what
they are, not their names, and for borders and budgets the whole steps they come to.

Amounts carry their unit: `15T tokens`, `4_096_000 samples` (sequences), `2.6M steps`; a bare `15T` means tokens. A piecewise value is a map
from where each piece begins: `{0 tokens: main, 7.038T tokens: second}`. A checkpoint is named `pretrain`, `pretrain@step=1200` or
`pretrain@tokens=7.0T`; one part of a corpus, `corpus/code`. Where a checkpoint is wanted, `hf:<folder or id>` is a Hugging Face model: a
folder by path or fsspec URL, or `owner/name` or `owner/name@revision` of the local Hugging Face cache, into which it is downloaded unless
`HF_HUB_OFFLINE` is set.

Names of stages, sources and the pipeline have at most 100 characters. Integers and amounts fit into 64 bits, other
numbers are finite, and durations last ten years at most. Narrower limits of a field are in the schema.

## Composing files

Three keys are resolved before a file is checked; a run records the result. Every error names the file and line where the value was written.

**`extends: base.yaml`** at the top: this file is merged over that one (a path relative to this file), which may extend another. Mappings
are merged key by key, this file's values win, lists and scalars are replaced, and `null` removes what the other file states:
`stages: {export: null}`.

**`variables: {lr: 1e-4, switch: 350k}`** at the top: `${lr}` alone is the value, with its type; inside a text it is inserted as it is
written: `mixture: {0 tokens: main, "${switch} tokens": second}`. Inside `{ }` and `[ ]` YAML wants the quotes. A value may be a list or
a mapping, and may use other variables. `$${` writes `${`. A variable that nothing uses is an error, unless it is inherited. A field that is
to become null, and not to be removed, takes it from a variable: `goldfish: ${none}` with `none: null`.

**`matrix:`** in a stage makes several stages of it, each named after the stage and the variant (`align-dpo`), in one of three forms:

    matrix: {qrpo: {}, dpo: {kind: dpo, loss: {beta: 0.1}}}  # names, and fields merged over the stage's as with extends
    matrix: {optimizer.lr: [1e-4, 2e-4], seed: [1, 2]}       # every combination: align-1e-4-1, align-1e-4-2, ...
    matrix: [qrpo, dpo]                                      # names only

In such a stage `${matrix}` is the variant's name: `from: align-${matrix}`. Elsewhere a variant is named like any other stage; in the lists
`after`, `checkpoints` and `evaluations`, `align` stands for all its variants, and `align-*` for all stages whose names begin so.

`--set` works on all of it: `variables.lr=2e-4`, `stages.align.seed=3` (what the stage states for all variants),
`stages.align.matrix.dpo.seed=3` or `stages.align-dpo.seed=3` (one variant). Where a stage states a mapping as a variable, a field of it is
changed for that stage alone: `stages.align.optimizer.lr=1e-6`.
"""
NESTED: tuple[type[BaseModel], ...] = (
    *(SourceSpec, Declared, AssumedInputs, DeclaredModel, CorpusSource, *get_args(get_args(FilterSpec)[0]), Repeats, Weight, Anneal),
    *(ModelSpec, RopeScaling, OptimizerSpec, ScheduleSpec, Goldfish, Precision, Anomalies, Checkpointing, Validation, LongContextStep),
    *(ConversationSource, Lora, Sampling, RewardSpec, QrpoLoss, DpoLoss, Memorisation, ByPosition, Generation, Harness, Gate, Sharpness),
    *(FigureSpec, Axis, Launch, Parallel, SlurmTask, Retries, Cluster),
)


def markdown() -> str:
    """The whole page."""
    sections = [INTRODUCTION, _section("The file", Pipeline), _section("Every stage", Stage)]
    sections += [_section(f"Stage `{kind}`", stage, leave_out=set(Stage.model_fields)) for kind, stage in STAGES.items()]
    for model in NESTED:
        sections.append(_section(model.__name__, model))
        if model is OptimizerSpec:
            sections.append(_optimizers())
    return "\n".join(sections)


def _optimizers() -> str:
    """What each optimizer reads, and where the defaults come from."""
    lines = ["| `name` | reads, beside `lr` | from |", "|---|---|---|"]
    for name, published in PUBLISHED.items():
        fields = ", ".join(f"`{field}` {json.dumps(value)}" for field, value in published.defaults.items())
        lines.append(f"| `{name}` | {fields} | {published.source} |")
    return "\n".join(["Defaults of a stage without a parent, or whose parent has another optimizer:", "", *lines, ""])


def _section(title: str, model: type[BaseModel], leave_out: Container[str] = ()) -> str:
    lines = [f"## {title}", "", " ".join((model.__doc__ or "").split()), "", "| field | type | default | role | |", "|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        text = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{field.alias or name}` | {_type(field.annotation)} | {_default(field)} | {role_of(model, name)} | {text} |")
    return "\n".join(lines) + "\n"


def _type(annotation: Any) -> str:
    return f"`{_spelled(annotation)}`".replace("|", "\\|")


def _spelled(annotation: Any) -> str:
    """An annotation as a reader writes it: unions with `|`, no modules, no metadata."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return "a stage" if any(isinstance(mark, Discriminator) for mark in arguments[1:]) else _spelled(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_spelled(argument) for argument in arguments)
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_spelled(argument) for argument in arguments)}]"
    return "null" if annotation is type(None) else str(annotation.__name__)


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.default_factory() if field.default_factory is not None else field.default
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    return f"`{json.dumps(value, default=str)}`".replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
