"""Parts of a Hugging Face model that a stage starts from: its weights as a checkpoint, and its tokenizer.

They belong to the stage that names the model. Two stages that name the same one share them, since the parts are the same work.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

import fsspec

from flows.graph import TOKENIZER, Input, Node
from infra.store import Artifact
from infra.store.hugging_face import TOKENIZER_FILES, HubModel, open_model
from infra.store.inputs import SourceError
from specs.dependencies import checkpoints
from specs.elsewhere import DeclaredModel
from specs.errors import FieldPath
from specs.hugging_face import HuggingFaceError
from specs.sources import SourceSpec, resolve_url
from specs.stages.import_model import ImportModelPart
from specs.stages.tokenizer import TokenizerPart, TokenizerStage
from specs.units import HUGGING_FACE, Reference

if TYPE_CHECKING:
    from flows.parts.builder import Builder

FIX = "name a folder, or a model that is in the local Hugging Face cache, with config.json, safetensors and tokenizer.json."


def open_models(builder: Builder) -> dict[str, HubModel]:
    """All Hugging Face models that a recipe names. What is wrong with one is a problem of the builder, where it is named first."""
    found: dict[str, HubModel] = {}
    tried: set[str] = set()
    for name, stage in builder.pipeline.stages.items():
        for path, ref in checkpoints(name, stage):
            if ref.hugging_face is None or str(ref) in tried:
                continue
            tried.add(str(ref))
            declared = builder.pipeline.elsewhere.models.get(str(ref))
            try:
                found[str(ref)] = open_model(ref.hugging_face, download=declared is None or builder.ask_network)
            except SourceError as error:
                if declared is None:
                    builder.problem(path, str(error), FIX)
                else:
                    found[str(ref)] = _absent(builder, ref, declared, str(error), path)
            except HuggingFaceError as error:
                builder.problem(path, str(error), f"correct its files, or {FIX}")
    return found


def _absent(builder: Builder, ref: Reference, declared: DeclaredModel, reason: str, path: FieldPath) -> HubModel:
    """What stands in a plan for a model that is declared and unavailable."""
    for name in (str(ref), f"{ref}{TOKENIZER}"):
        builder.absent(name, name, SourceSpec(url=name, format="text"), reason, path)
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


def _folder(builder: Builder, key: str, model: HubModel, include: list[str], path: FieldPath) -> Input:
    """Files of a model's folder."""
    if key in builder.graph.absent:
        return Input("external", builder.graph.digests[key], key)
    read = builder.folder(key, model.url, include, path, FIX)
    return Input(read.kind, read.fingerprint, key)


def add_import(builder: Builder, ref: Reference, path: FieldPath) -> Node:
    """The weights of a model as a checkpoint, in a part of the stage that `path` leads to."""
    stage, model = str(path[1]), builder.graph.models[str(ref)]
    name = f"{stage}/import" if path[-1] == "from" else f"{stage}/import-{int(path[-1]) + 1}"
    if (existing := builder.graph.nodes.get(name)) is not None:
        return existing
    part = ImportModelPart(
        model=model.model,
        url=model.url,
        reference=model.reference,
        chat=model.chat,
        license=model.license,
        language=model.language,
    )
    inputs = {"folder": _folder(builder, str(ref), model, list(model.files), path)}
    return builder.node(name, stage, part, inputs, kind="import_model", start_step=0, end_step=1, leg=str(ref))


def add_model_tokenizer(builder: Builder, ref: Reference, name: str, stage: str, path: FieldPath, vocab_size: int | None = None) -> Node:
    """The tokenizer of a model, as a tokenizer stage that states `from:` makes it."""
    if (existing := builder.graph.nodes.get(name)) is not None:
        return existing
    model = builder.graph.models[str(ref)]
    read = _folder(builder, f"{ref}{TOKENIZER}", model, TOKENIZER_FILES, path)
    fields = TokenizerStage.model_fields
    part = TokenizerPart(
        path=model.url, vocab_size=vocab_size or model.model.vocab_size, bytes_per_source=fields["bytes_per_source"].default
    )
    return builder.node(name, stage, part, {"folder": read}, kind="tokenizer")


def origin(node: Node) -> str | None:
    """The `hf:` reference that a part of a Hugging Face model was made from; None for any other part."""
    folder = node.inputs.get("folder")
    return folder.name.removesuffix(TOKENIZER) if folder is not None and folder.name.startswith(HUGGING_FACE) else None


def tokenizer_digest(builder: Builder, read: Input) -> str | None:
    """SHA-256 of the tokenizer.json of a tokenizer part, or of an imported model; None for a tokenizer that is not trained yet."""
    node = builder.graph.nodes[read.node or ""]
    if isinstance(node.part, ImportModelPart):
        return builder.graph.models[node.leg].tokenizer_digest
    part, folder = cast(TokenizerPart, node.part), node.inputs.get("folder")
    if folder is not None and folder.name in builder.graph.absent:
        return folder.fingerprint
    if part.path is not None:
        try:
            fs, root = fsspec.core.url_to_fs(resolve_url(part.path))
            return hashlib.sha256(fs.cat_file(f"{root.rstrip('/')}/tokenizer.json")).hexdigest()
        except (OSError, ValueError):  # what is wrong with the folder is said where it is named
            return None
    artifact = Artifact(builder.store, node.path)
    record = artifact.manifest["files"].get("tokenizer.json") if artifact.complete else None
    return str(record["sha256"]) if record else None
