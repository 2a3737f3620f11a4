"""Checks that the sources and stages that a recipe's stages name exist.

Invariant: a misspelt name is one problem. If several fields agree on a name that nothing has, and nothing
names something similar, that is misspelt and the fields are right.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from specs.dependencies import uses
from specs.errors import FieldPath, Problem, did_you_mean, dotted, nearest
from specs.pipeline import Pipeline
from specs.stages import TRAINING
from specs.stages.base import Stage
from specs.stages.corpus import CorpusStage
from specs.units import Reference


class _NameUse(NamedTuple):
    """A name that a stage gives."""

    group: str  # `sources` or `stages`
    name: str
    path: FieldPath  # of the field that gives it
    fitting: Collection[str]  # names that the field may give


def references(name: str, stage: Stage) -> list[tuple[FieldPath, Reference, tuple[str, ...]]]:
    """The references of a stage to others, with their paths and the kinds that each may name."""
    used = [(use.path, use.reference, use.kinds) for use in uses(name, stage)]
    at: FieldPath = ("stages", name, "exclude")
    return [
        *used,
        *(((*at, index), Reference.parse(ref), TRAINING) for index, ref in enumerate(stage.excluded_stages)),
    ]


def planted_sources(name: str, stage: Stage) -> Iterator[tuple[FieldPath, str]]:
    """The sources whose documents a corpus plants, with the paths of the fields that name them."""
    for source, process in stage.sources.items() if isinstance(stage, CorpusStage) else ():
        for key, planted in process.planted.items():
            if planted.documents is not None:
                yield ("stages", name, "sources", source, "planted", key, "documents"), planted.documents


def check_names(pipeline: Pipeline, names: set[str]) -> Iterator[Problem]:
    """The problems of names that nothing has. `names`: those of all stages, right or wrong."""
    named = [use for name, stage in pipeline.stages.items() for use in _named(pipeline, names, name, stage)]
    known: dict[str, Collection[str]] = {"sources": pipeline.sources, "stages": names}
    given: dict[tuple[str, str], list[str]] = {}  # the fields of each name
    for use in named:
        given.setdefault((use.group, use.name), []).append(dotted(use.path))
    variants = {} if pipeline._document is None else pipeline._document.variants
    for group, name, path, fitting in named:
        if name in known[group]:
            continue
        fields, what = given[group, name], group.removesuffix("s")
        misspelt = nearest(name, [other for other in fitting if (group, other) not in given])
        if group == "stages" and name in variants:
            message = f"stage '{name}' is a matrix of {', '.join(variants[name])}; name one of them"
            yield Problem(path, message)
        elif misspelt is None or len(fields) == 1:
            below = " under sources:" if group == "sources" else ""
            yield Problem(path, f"there is no {what} '{name}'{below}", did_you_mean(name, fitting))
        elif dotted(path) == fields[0]:
            message = f"nothing names {what} '{misspelt}', and {', '.join(fields)} name '{name}'"
            yield Problem((group, misspelt), message, f"call it '{name}', or correct these fields.")


def _named(pipeline: Pipeline, names: set[str], name: str, stage: Stage) -> Iterator[_NameUse]:
    for source, field in stage.source_fields().items():
        yield _NameUse("sources", source, ("stages", name, *field), pipeline.sources)
    for path, source in planted_sources(name, stage):
        yield _NameUse("sources", source, path, pipeline.sources)
    for index, other in enumerate(stage.after):
        yield _NameUse("stages", other, ("stages", name, "after", index), names)
    for path, ref, kinds in references(name, stage):
        fitting = [fit for fit, other in pipeline.stages.items() if other.kind in kinds]
        yield _NameUse("stages", ref.stage, path, fitting)
