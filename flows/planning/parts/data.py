"""Parts of the kinds that make data: `tokenizer`, `corpus`, `conversations`, `mixture`."""

from __future__ import annotations

from typing import cast

from flows.planning.graph import Input
from flows.planning.parts.builder import Builder
from specs.sources import TABLES
from specs.stages.base import SourcePart
from specs.stages.conversations import ConversationsPart, ConversationsStage
from specs.stages.corpus import CorpusPart, CorpusSource, CorpusStage
from specs.stages.mixture import MixturePart, MixtureStage, integers
from specs.stages.tokenizer import TokenizerPart, TokenizerStage
from specs.units import Reference

WEB = ("warc",)
WEB_COLUMNS = ("url", "date")


def add_tokenizer(builder: Builder, name: str) -> None:
    """One part."""
    stage = cast(TokenizerStage, builder.pipeline.stages[name])
    if stage.from_ is not None:
        vocab_size = stage.vocab_size if "vocab_size" in stage.model_fields_set else None
        builder.model_tokenizer(stage.from_, name, name, ("stages", name, "from"), vocab_size)
        return
    inputs = {f"source:{index}": builder.documents(source) for index, source in enumerate(stage.sources)}
    if stage.path is not None:
        path = ("stages", name, "path")
        inputs["folder"] = builder.folder(
            f"{name}.path", stage.path, ["*.json", "*.jinja"], path, "name a folder with tokenizer.json."
        )
    part = TokenizerPart(
        sources=[builder.pipeline.sources[source] for source in stage.sources],
        path=stage.path,
        vocab_size=stage.vocab_size,
        reserved=stage.reserved,
        bytes_per_source=stage.bytes_per_source,
    )
    builder.node(name, name, part, inputs)


def add_corpus(builder: Builder, name: str) -> None:
    """One part per source."""
    for source, process in cast(CorpusStage, builder.pipeline.stages[name]).sources.items():
        _add_source(builder, name, source, CorpusPart, _filter_files(builder, name, source, process))


def _filter_files(builder: Builder, stage: str, source: str, process: CorpusSource) -> dict[str, Input]:
    """Files that filters read, as inputs; a filter on columns that the source's format does not have is a
    problem."""
    inputs: dict[str, Input] = {}
    format_ = builder.pipeline.sources[source].format
    for step, chosen in enumerate(process.filters):
        path = ("stages", stage, "sources", source, "filters", step)
        missing = set(chosen.columns()) & set(process.columns()) - set(WEB_COLUMNS if format_ in WEB else ())
        if missing and format_ not in TABLES:
            columns = ", ".join(f"'{column}'" for column in sorted(missing))
            message = f"it reads column {columns}, which documents of format {format_} do not have"
            builder.problem(path, message, "use another filter.")
        for number, files in enumerate(chosen.files()):
            key = f"{stage}/{source}.filters.{step}.{number}"
            inputs[f"filter:{step}:{number}"] = builder.outside(key, files, path, "correct the url.")
    return inputs


def add_conversations(builder: Builder, name: str) -> None:
    """One part per source."""
    for source in cast(ConversationsStage, builder.pipeline.stages[name]).sources:
        _add_source(builder, name, source, ConversationsPart, {})


def _add_source(
    builder: Builder, name: str, source: str, kind: type[SourcePart], filter_files: dict[str, Input]
) -> None:
    stage = cast(CorpusStage | ConversationsStage, builder.pipeline.stages[name])
    inputs = {"tokenizer": builder.part(stage.tokenizer), "documents": builder.documents(source)}
    listing = builder.graph.listings.get(source)
    own = (
        {}
        if isinstance(stage, ConversationsStage)
        else {"memory": stage.memory, "shard_tokens": stage.shard_tokens}
    )
    part = kind(
        source=builder.pipeline.sources[source],
        process=stage.sources[source],
        seed=stage.seed,
        files_per_task=stage.files_per_task,
        listing=[file.path for file in listing.files] if listing else [],
        **own,
    )
    builder.node(f"{name}/{source}", name, part, inputs | filter_files)


def add_mixture(builder: Builder, name: str) -> None:
    """One part; when it is annealed, one per piece and one for its end. Sources in the order of their
    fingerprints."""
    stage = cast(MixtureStage, builder.pipeline.stages[name])
    field = "weights" if stage.weights is not None else "proportional"
    for number, pieces in enumerate(stage.pieces, start=1):
        chosen = [(builder.part(Reference.parse(source)), weight) for source, weight in pieces.items()]
        chosen.sort(key=lambda pair: pair[0].fingerprint)
        part = MixturePart(
            weights=integers([weight for _, weight in chosen]),
            proportional=field == "proportional",
            seed=stage.seed,
        )
        inputs = {f"source:{index}": read for index, (read, _) in enumerate(chosen)}
        builder.node(f"{name}/{number}" if stage.anneal else name, name, part, inputs)
        if len({read.fingerprint for read, _ in chosen}) < len(chosen):
            builder.problem(("stages", name, field), "two of these are the same", "add their weights.")
            return
        tokenizers = {builder.tokenizer_of(read).name for read, _ in chosen}
        if len(tokenizers) > 1:
            message = f"corpora of different tokenizers: {', '.join(sorted(tokenizers))}"
            builder.problem(("stages", name, field), message, "use one tokenizer.")
            return
