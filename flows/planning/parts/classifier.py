"""Parts of a `classifier` stage, and of the filters whose scores come from a model: sources -> features ->
classifier -> scores.

A folder or file of a model is an input, by the digest of its content. Its small files are read before
anything starts.
"""

from typing import Any, cast

import fsspec

from flows.planning.graph import Input
from flows.planning.parts.builder import Builder, numbered, reads, shared
from infra.store.inputs import Listing
from specs.errors import FieldPath, did_you_mean
from specs.filters import ScoreFilter, scored
from specs.foreign import MAX_BYTES, ForeignError, check_length, parse_json
from specs.rewards import CLASSIFIER_FILES
from specs.scoring import CHARACTERS_PER_TOKEN, TOKENS, ScoreModel, percentile_name
from specs.sources import CONVERSATIONAL, TABLES, SourceSpec
from specs.stages.classifier import (
    ClassifierPart,
    ClassifierStage,
    Encoder,
    FeaturesPart,
    Perceptron,
    ScoresPart,
)
from specs.stages.conversations import ConversationsStage
from specs.stages.corpus import CorpusStage

WEIGHTS, TOKENIZER = (".safetensors",), ("tokenizer.json", "vocab.txt", "vocab.json", ".model")
FOLDER = "name a folder with config.json, safetensors and a tokenizer."


def add_classifier(builder: Builder, name: str, stage: ClassifierStage) -> None:
    labelled = [
        (_features(builder, name, stage, source, labelled.label_column), labelled.label)
        for source, labelled in stage.sources.items()
    ]
    labelled.sort(key=lambda pair: (pair[0].fingerprint, pair[1] or ""))
    inputs = numbered("source", (features for features, _ in labelled))
    if stage.reference is not None:
        inputs["reference"] = _features(builder, name, stage, stage.reference, None)
    labels = [label for _, label in labelled]
    builder.node(name, name, ClassifierPart(**shared(stage, ClassifierPart) | {"labels": labels}), inputs)
    metrics = stage.metrics()
    for path, metric in builder.stated_metrics(name):
        if metrics is not None and metric not in metrics:
            builder.unknown_metric(path, name, metric, metrics)


def _features(
    builder: Builder, name: str, stage: ClassifierStage, source: str, label_column: str | None
) -> Input:
    """Adds the texts or embeddings of a source, as a part of the stage."""
    spec, training = builder.pipeline.sources[source], stage.training
    columns = [column for column in (label_column, stage.language_column) if column is not None]
    if columns and spec.format not in TABLES:
        field = ("sources", source, "label_column") if label_column else ("language_column",)
        message = f"it reads column '{columns[0]}', which documents of format {spec.format} do not have"
        fix = f"name a source in rows: {', '.join(TABLES)}."
        builder.problem(("stages", name, *field), message, fix)
        columns = []
    inputs = {"documents": builder.documents(source)}
    encoder = None
    if not isinstance(training, Perceptron):
        most = training.max_characters
    else:
        most = CHARACTERS_PER_TOKEN * training.max_tokens
        encoder = Encoder(**{field: getattr(training, field) for field in Encoder.model_fields})
        inputs["encoder"] = encoder_folder(builder, name, training)
    part = FeaturesPart(
        **_read(builder, source, columns, stage.files_per_task),
        encoder=encoder,
        max_characters=most,
        label_column=label_column,
        language_column=stage.language_column,
    )
    return reads(builder.node(f"{name}/{source}", name, part, inputs, kind="features"))


def encoder_folder(builder: Builder, stage: str, training: Perceptron) -> Input:
    path: FieldPath = ("stages", stage, "training", "encoder")
    return _folder(builder, f"{stage}.encoder", training.encoder, path)


def scores(
    builder: Builder, name: str, stage: CorpusStage | ConversationsStage, source: str
) -> dict[str, Input]:
    """Adds the scores that a source's filters need, each as a part of the stage; returns them by role."""
    inputs_of_steps: dict[str, Input] = {}
    for step, chosen in scored(stage.sources[source].filters).items():
        at: FieldPath = ("stages", name, "sources", source, "filters", step)
        if chosen.column in builder.pipeline.sources[source].metadata:
            message = f"source '{source}' already has column '{chosen.column}', which the filter adds"
            builder.problem((*at, "column"), message, "set another column.")
        part, inputs = _scores_part(builder, stage.files_per_task, name, source, chosen, at)
        label = f"{name}/{source}/scores-{step + 1}"
        inputs_of_steps[f"scores:{step}"] = reads(builder.node(label, name, part, inputs, kind="scores"))
    return inputs_of_steps


def _scores_part(
    builder: Builder, files_per_task: int, name: str, source: str, chosen: ScoreFilter, at: FieldPath
) -> tuple[ScoresPart, dict[str, Input]]:
    model = chosen.model
    assert model is not None, "the caller has seen it"
    inputs = {"documents": builder.documents(source)}
    own = _read(builder, source, [], files_per_task) | {"of": chosen.of}
    if model.from_ is not None:
        classifier = cast(ClassifierStage, builder.pipeline.stages[model.from_.stage])
        _check_stage(builder, chosen, model, classifier, at)
        inputs["classifier"] = builder.part(model.from_)
        training = classifier.training
        if isinstance(training, Perceptron):
            inputs["encoder"] = encoder_folder(builder, model.from_.stage, training)
        url = training.encoder if isinstance(training, Perceptron) else None
        column = classifier.language_column if classifier.by_language else None
        if column is not None and (format_ := builder.pipeline.sources[source].format) in TABLES:
            own |= _read(builder, source, [column], files_per_task)
        elif column is not None and format_ not in CONVERSATIONAL:
            message = (
                f"'{model.from_}' has a model for each language, and documents of format {format_} have no"
                f" column '{column}'"
            )
            builder.problem((*at, "model", "from"), message, f"name a source in rows: {', '.join(TABLES)}.")
        part = ScoresPart(**own, method=training.method, label=model.label, language_column=column, url=url)
        return part, inputs
    assert model.url is not None, "one of the two is stated"
    path, key = (*at, "model", "url"), f"{name}/{source}.scores.{at[-1]}"
    if model.fasttext:
        inputs["model"] = builder.outside(
            key, SourceSpec(url=model.url, format="text"), path, "correct the url."
        )
        return ScoresPart(**own, method="fasttext", label=model.label, url=model.url), inputs
    inputs["model"] = _folder(builder, key, model.url, path)
    if (listing := builder.graph.listings.get(key)) is not None:
        _check_label(builder, listing, model, (*at, "model", "label"))
    part = ScoresPart(
        **own,
        method="sequence-classifier",
        label=model.label,
        max_tokens=model.max_tokens or TOKENS,
        url=model.url,
    )
    return part, inputs


def _read(builder: Builder, source: str, columns: list[str], files_per_task: int) -> dict[str, Any]:
    """The fields with which a part reads the documents of a source: with these columns only, so that another
    column that a filter reads changes no fingerprint."""
    listing = builder.graph.listings.get(source)
    spec = builder.pipeline.sources[source]
    return {
        "source": spec.model_copy(update={"metadata": sorted(set(columns)), "id_column": None}),
        "files_per_task": files_per_task,
        "listing": [file.path for file in listing.files] if listing else [],
    }


def _check_stage(
    builder: Builder, chosen: ScoreFilter, model: ScoreModel, classifier: ClassifierStage, at: FieldPath
) -> None:
    """Checks that the label, percentiles and languages that a filter names are those of the stage."""
    stage = str(model.from_)
    if classifier.labels is not None and model.label not in classifier.labels:
        message = f"'{stage}' has no label '{model.label}'"
        builder.problem((*at, "model", "label"), message, did_you_mean(model.label, classifier.labels))
    stored = [percentile_name(value) for value in classifier.percentiles]
    for field in ("min", "max"):
        bound = getattr(chosen, field)
        if isinstance(bound, str) and bound not in stored:
            message = f"'{stage}' stores {', '.join(stored) or 'no percentiles'}, not {bound}"
            builder.problem(
                (*at, field), message, f"add {bound.removeprefix('p')} to the percentiles of '{stage}'."
            )
    if chosen.percentiles and chosen.by is not None and classifier.language_column is None:
        message = f"'{stage}' states no language_column, so its percentiles are not by language"
        builder.problem((*at, "by"), message, "set language_column there, or leave out by.")


def _folder(builder: Builder, key: str, url: str, path: FieldPath) -> Input:
    """A Hugging Face folder as an input, checked for safetensors, a tokenizer and config.json."""
    folder = builder.folder(key, url, CLASSIFIER_FILES, path, FOLDER)
    if (listing := builder.graph.listings.get(key)) is not None:
        names = [file.path for file in listing.files]
        for what, ends in (
            ("safetensors", WEIGHTS),
            ("tokenizer", TOKENIZER),
            ("config.json", ("config.json",)),
        ):
            if not any(name.endswith(ends) for name in names):
                message = f"{url} has no {what}; it has {', '.join(names[:6])}"
                builder.problem(path, message, f"{FOLDER} Weights in other files (.bin) are never opened.")
    return folder


def _check_label(builder: Builder, listing: Listing, model: ScoreModel, path: FieldPath) -> None:
    """Checks that the label is one of `id2label` in config.json."""
    try:
        fs, root = fsspec.core.url_to_fs(listing.url)
        place = f"{root.rstrip('/')}/config.json"
        check_length(fs.size(place), MAX_BYTES)
        config = parse_json(fs.cat_file(place))
    except (OSError, ForeignError) as error:
        builder.problem((*path[:-1], "url"), f"config.json of {model.url} cannot be read: {error}", FOLDER)
        return
    names = config.get("id2label") if isinstance(config, dict) else None
    labels = [str(name) for name in names.values()] if isinstance(names, dict) else ["LABEL_0", "LABEL_1"]
    if model.label not in labels:
        builder.problem(path, f"{model.url} has no label '{model.label}'", did_you_mean(model.label, labels))
