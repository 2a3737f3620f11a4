"""Parts of the kinds that make data: `tokenizer`, `corpus`, `conversations`, `mixture`."""

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, cast

from flows.planning.graph import Input
from flows.planning.parts.builder import Builder, numbered, shared
from flows.planning.parts.classifier import scores
from flows.planning.parts.domain_weights import learned_sources
from specs.errors import FieldPath, SpecError
from specs.filters import GLOBAL_FILTERS, FilterSpec, NearDuplicatesFilter, columns_read
from specs.sources import CONVERSATIONAL, TABLES
from specs.stages.base import SourcePart
from specs.stages.conversations import (
    CONTROL_COLUMNS,
    ConversationSource,
    ConversationsPart,
    ConversationsStage,
)
from specs.stages.corpus import CorpusPart, CorpusSource, CorpusStage
from specs.stages.mixture import MixturePart, MixtureStage, integers
from specs.stages.tokenizer import TokenizerPart, TokenizerStage
from specs.units import Reference

WEB = ("warc",)
WEB_COLUMNS = ("url", "date")
TextStage = CorpusStage | ConversationsStage


def add_tokenizer(builder: Builder, name: str, stage: TokenizerStage) -> None:
    if stage.from_ is not None:
        vocab_size = stage.vocab_size if "vocab_size" in stage.model_fields_set else None
        builder.model_tokenizer(stage.from_, name, name, ("stages", name, "from"), vocab_size)
        return
    inputs = numbered("source", map(builder.documents, stage.sources))
    if stage.path is not None:
        path = ("stages", name, "path")
        inputs["folder"] = builder.folder(
            f"{name}.path", stage.path, ["*.json", "*.jinja"], path, "name a folder with tokenizer.json."
        )
    sources = [builder.pipeline.sources[source] for source in stage.sources]
    part = TokenizerPart(**shared(stage, TokenizerPart) | {"sources": sources})
    builder.node(name, name, part, inputs)


def add_corpus(builder: Builder, name: str, stage: CorpusStage) -> None:
    sources = builder.pipeline.sources

    def add(source: str, inputs: dict[str, Input]) -> None:
        process = stage.sources[source]
        texts = {key: planted.documents for key, planted in process.planted.items() if planted.documents}
        inputs |= scores(builder, name, stage, source)
        inputs |= {f"planted:{key}": builder.documents(text) for key, text in texts.items()}
        planted = {key: sources[text] for key, text in texts.items()}
        _add_source(builder, name, stage, source, CorpusPart, inputs, planted=planted)

    _add_in_order(builder, name, stage, add)


def _check_columns(
    builder: Builder, stage: str, source: str, process: CorpusSource | ConversationSource
) -> None:
    """Adds a problem for each filter, and for `pii`, on columns that the source's format does not have."""
    format_ = builder.pipeline.sources[source].format
    needed = set(columns_read(process.filters, process.replaced_only))
    steps: list[tuple[FieldPath, Iterable[str]]] = [
        (("filters", step), chosen.columns()) for step, chosen in enumerate(process.filters)
    ]
    for field, named in [*steps, (("pii", "only"), process.replaced_only)]:
        columns = set(named) & needed
        if format_ in CONVERSATIONAL:
            missing = columns & set(CONTROL_COLUMNS)
            what = f"of which conversations of format {format_} are made: filters read the other columns"
        else:
            missing = columns - set(WEB_COLUMNS if format_ in WEB else ())
            missing = set() if format_ in TABLES else missing
            what = f"which documents of format {format_} do not have"
        if missing:
            shown = ", ".join(f"'{column}'" for column in sorted(missing))
            path = ("stages", stage, "sources", source, *field)
            builder.problem(path, f"it reads column {shown}, {what}", "use another filter or column.")


def _filter_files(builder: Builder, stage: str, source: str, filters: list[FilterSpec]) -> dict[str, Input]:
    inputs: dict[str, Input] = {}
    for step, chosen in enumerate(filters):
        path = ("stages", stage, "sources", source, "filters", step)
        for number, files in enumerate(chosen.files()):
            key = f"{stage}/{source}.filters.{step}.{number}"
            inputs[f"filter:{step}:{number}"] = builder.outside(key, files, path, "correct the url.")
    return inputs


def add_conversations(builder: Builder, name: str, stage: ConversationsStage) -> None:

    def add(source: str, inputs: dict[str, Input]) -> None:
        inputs |= scores(builder, name, stage, source)
        _add_source(builder, name, stage, source, ConversationsPart, inputs)

    _add_in_order(builder, name, stage, add)


def _add_in_order(
    builder: Builder, name: str, stage: TextStage, add_part: Callable[[str, dict[str, Input]], None]
) -> None:
    """Calls `add_part` for each source of a stage, with the files and parts that its filters read, after the
    sources of the stage that these filters name under `not_in`."""
    waiting: list[str] = []

    def add(source: str) -> None:
        if f"{name}/{source}" in builder.graph.nodes:
            return
        waiting.append(source)
        filters = stage.sources[source].filters
        _check_columns(builder, name, source, stage.sources[source])
        inputs = _filter_files(builder, name, source, filters)
        for step, chosen in enumerate(filters):
            if isinstance(chosen, GLOBAL_FILTERS):
                path: FieldPath = ("stages", name, "sources", source, "filters", step, "not_in")
                parts = [seen(chosen, text, (*path, at)) for at, text in enumerate(chosen.not_in)]
                inputs |= numbered(f"not_in:{step}", sorted(parts, key=lambda part: part.fingerprint))
        waiting.pop()
        add_part(source, inputs)

    def seen(step: FilterSpec, text: str, path: FieldPath) -> Input:
        """A part named under `not_in`. SpecError if parts name each other; adds a problem if the part does
        not store the signatures that are compared."""
        ref = Reference.parse(text)
        other = cast(TextStage, builder.pipeline.stages[ref.stage])
        source = ref.part or next(iter(other.sources))
        if ref.stage == name:
            if source in waiting:
                cycle = " -> ".join(f"{name}/{part}" for part in [*waiting[waiting.index(source) :], source])
                raise SpecError.of(
                    path, f"the parts compared form a cycle: {cycle}", "leave one of them out."
                )
            add(source)
        near = [chosen.identity_fields() for chosen in other.sources[source].filters]
        if isinstance(step, NearDuplicatesFilter) and step.identity_fields() not in near:
            message = (
                f"'{ref}' has no near-duplicates filter with the same settings, so its signatures are not"
                " stored"
            )
            builder.problem(path, message, f"give '{ref}' the same filter.")
        return builder.part(ref)

    for source in stage.sources:
        add(source)


def _add_source(
    builder: Builder,
    name: str,
    stage: TextStage,
    source: str,
    kind: type[SourcePart],
    more: dict[str, Input],
    **fields: Any,
) -> None:
    inputs = {"tokenizer": builder.part(stage.tokenizer), "documents": builder.documents(source)}
    listing = builder.graph.listings.get(source)
    part = kind(
        **shared(stage, kind),
        source=builder.pipeline.sources[source],
        process=stage.sources[source],
        listing=[file.path for file in listing.files] if listing else [],
        **fields,
    )
    builder.node(f"{name}/{source}", name, part, inputs | more)


def add_mixture(builder: Builder, name: str, stage: MixtureStage) -> None:
    """Adds one part; for an annealed mixture, one per piece and one for its end. Sources are in the order of
    their fingerprints."""
    field = next(field for field in ("weights", "proportional", "learned") if getattr(stage, field))
    further: dict[str, Input] = {}
    if stage.learned is not None:
        positions, further["learned"] = learned_sources(builder, name, stage.learned)
        drawn = [[(source, Fraction(1), position) for source, position in positions]]
    else:
        drawn = [
            [(builder.part(Reference.parse(source)), weight, 0) for source, weight in pieces.items()]
            for pieces in stage.pieces
        ]
    for number, chosen in enumerate(drawn, start=1):
        chosen.sort(key=lambda entry: entry[0].fingerprint)
        part = MixturePart(
            weights=integers([weight for _, weight, _ in chosen]),
            learned=[position for *_, position in chosen] if further else [],
            proportional=field == "proportional",
            seed=stage.seed,
        )
        inputs = numbered("source", (source for source, *_ in chosen)) | further
        builder.node(f"{name}/{number}" if stage.anneal else name, name, part, inputs)
        if len({source.fingerprint for source, *_ in chosen}) < len(chosen):
            builder.problem(("stages", name, field), "two of these are the same", "add their weights.")
            return
        tokenizers = {builder.tokenizer_of(source).name for source, *_ in chosen}
        if len(tokenizers) > 1:
            message = f"corpora of different tokenizers: {', '.join(sorted(tokenizers))}"
            builder.problem(("stages", name, field), message, "use one tokenizer.")
            return
