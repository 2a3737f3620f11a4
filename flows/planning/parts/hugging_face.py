"""Parts of a Hugging Face model that a stage starts from: its weights as a checkpoint, and its tokenizer.

They belong to the stage that names the model. Two stages that name the same one share them, as duplicates.
"""

from __future__ import annotations

from flows.planning.graph import TOKENIZER
from flows.planning.parts.builder import FIX, Builder
from infra.store.hugging_face import HubModel, open_model
from infra.store.inputs import SourceError
from specs.assumed_inputs import DeclaredModel
from specs.dependencies import checkpoints
from specs.errors import FieldPath
from specs.hugging_face import HuggingFaceError
from specs.sources import SourceSpec
from specs.units import Reference


def open_models(builder: Builder) -> dict[str, HubModel]:
    """All Hugging Face models that a recipe names. A mistake in one is a problem at the field that names it
    first."""
    found: dict[str, HubModel] = {}
    tried: set[str] = set()
    for name, stage in builder.pipeline.stages.items():
        for path, ref in checkpoints(name, stage):
            if ref.hugging_face is None or str(ref) in tried:
                continue
            tried.add(str(ref))
            declared = builder.pipeline.assumed_inputs.models.get(str(ref))
            try:
                found[str(ref)] = open_model(
                    ref.hugging_face, download=declared is None or builder.ask_network
                )
            except SourceError as error:
                if declared is None:
                    builder.problem(path, str(error), FIX)
                else:
                    found[str(ref)] = _absent(builder, ref, declared, str(error), path)
            except HuggingFaceError as error:
                builder.problem(path, str(error), f"correct its files, or {FIX}")
    return found


def _absent(
    builder: Builder, ref: Reference, declared: DeclaredModel, reason: str, path: FieldPath
) -> HubModel:
    """The model that a plan uses for a declared and unavailable one."""
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
    )
