"""Parts of a Hugging Face model that a stage starts from: its weights as a checkpoint, and its tokenizer; for
an architecture other than Apertus, its folder as it is.

They belong to the stage that names the model. Two stages that name the same model share them, as duplicates.
"""

from typing import cast

from flows.planning.graph import TOKENIZER
from flows.planning.parts.builder import FIX, Builder
from infra.store.hugging_face import HubModel, open_model
from infra.store.inputs import SourceError
from specs.assumed_inputs import DeclaredModel
from specs.dependencies import checkpoints
from specs.errors import FieldPath
from specs.hugging_face import HuggingFaceError
from specs.sources import SourceSpec
from specs.stages.evaluate import EvaluateStage
from specs.trajectory import candidates
from specs.units import Reference


def open_models(builder: Builder) -> dict[str, HubModel]:
    """All Hugging Face models that a recipe names. A mistake in a model is a problem at the first field that
    names it."""
    models: dict[str, HubModel] = {}
    tried: set[str] = set()
    for name, stage in builder.pipeline.stages.items():
        for path, ref in checkpoints(name, stage):
            if ref.hugging_face is None or str(ref) in tried:
                continue
            tried.add(str(ref))
            declared = builder.pipeline.assumed_inputs.models.get(str(ref))
            try:
                models[str(ref)] = open_model(
                    ref.hugging_face, download=declared is None or builder.ask_network
                )
            except SourceError as error:
                if declared is None:
                    builder.unreadable(path, error, FIX, ref.hugging_face)
                else:
                    models[str(ref)] = _absent(builder, ref, declared, str(error), path)
            except HuggingFaceError as error:
                builder.problem(path, str(error), f"correct its files, or {FIX}")
    return models


def check_other_models(builder: Builder) -> None:
    """Adds a problem for each use of a model of another architecture other than answering prompts and doing
    tasks."""
    can = (
        "it can be sampled from (preference_data: sampler, generators), evaluated (evaluate: generation,"
        " harness) and asked as a judge of answers (reward: judge)"
    )
    for name, stage in builder.pipeline.stages.items():
        for path, ref in checkpoints(name, stage):
            if (model := builder.other_model(ref)) is None or path[-2] == "judge":
                continue
            what = f"'{ref}' is a {model.architecture}"
            if stage.kind == "preference_data" and path == ("stages", name, "from"):
                message = f"{what}, whose reference log-probabilities the training engine cannot compute"
                builder.problem(
                    path, message, f"name the model that will be trained, and set sampler: {ref}."
                )
            elif stage.kind == "tokenizer":
                message = f"{what}; only the tokenizer of an Apertus is imported with its model"
                builder.problem(path, message, "set path: and its folder instead of from.")
            elif stage.kind == "evaluate":
                _check_evaluated(builder, name, cast(EvaluateStage, stage), what)
            elif stage.kind != "preference_data":
                message = f"{what}, which {stage.kind} cannot read: {can}"
                builder.problem(path, message, "name a checkpoint, or a folder with an ApertusForCausalLM.")
    for name, stage in builder.pipeline.stages.items():
        if stage.kind == "select":
            for path, ref in candidates(builder.pipeline, name):
                if (model := builder.other_model(ref)) is not None:
                    message = f"'{name}' chooses a checkpoint, and '{ref}' is a {model.architecture}"
                    builder.problem(path, message, f"leave this evaluation out of '{name}'.")


def _check_evaluated(builder: Builder, name: str, stage: EvaluateStage, what: str) -> None:
    """Adds a problem for each measurement of another architecture beyond answers and tasks."""
    at: FieldPath = ("stages", name)
    for field in ("sources", "by_position", "memorisation"):
        if getattr(stage, field):
            message = f"{what}, which the training engine cannot compute; it measures generation and harness"
            fix = "leave it out; tasks of the harness, such as wikitext, measure the perplexity of any model."
            builder.problem((*at, field), message, fix)


def _absent(
    builder: Builder, ref: Reference, declared: DeclaredModel, reason: str, path: FieldPath
) -> HubModel:
    """The model that a plan uses in place of a declared model that is unavailable."""
    for name in (str(ref), f"{ref}{TOKENIZER}"):
        builder.unavailable(name, name, SourceSpec(url=name, format="text"), reason, path)
    return HubModel(
        reference=ref.hugging_face or "",
        url=str(ref),
        model=declared.model,
        files=(),
        context=declared.context,
        chat=declared.chat,
        license="",
        language="",
        tokenizer_digest=builder.graph.digests[f"{ref}{TOKENIZER}"],
        shape=declared.shape,
        architecture="model of another architecture" if declared.model is None else "ApertusForCausalLM",
    )
