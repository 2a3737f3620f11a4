"""Loads a YAML file as a checked recipe. All problems of a file are reported at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specs.checks import check
from specs.compose import compose, distinct
from specs.document import Document
from specs.errors import Problem, SpecError
from specs.explain import explain
from specs.launch import Launch
from specs.locations import located
from specs.pipeline import AnyStage, Pipeline
from specs.sources import SourceSpec


def load(path: str | Path, overrides: Iterable[str] = ()) -> Pipeline:
    """Reads, composes, overrides and checks a recipe. Raises SpecError with every problem found."""
    return validate(compose(path, overrides))


def validate(document: Document) -> Pipeline:
    """The pipeline of a document. Raises SpecError with every problem in the fields and their relations."""
    problems: list[Problem] = []
    try:
        pipeline = located(Pipeline.model_validate(document.data), document)
    except ValidationError as error:
        problems = [explain(Pipeline, document, details) for details in error.errors()]
        pipeline = _what_is_right(document.data)
    pipeline._document = document
    problems += [
        replace(found, where=document.where(found.path)) for found in check(pipeline, _names(document.data))
    ]
    problems = distinct(document, problems)
    if problems:
        raise SpecError(problems)
    return pipeline


def _names(data: dict[str, Any]) -> set[str]:
    """Names of all stages of a document, right or wrong."""
    stages = data.get("stages")
    return set(stages) if isinstance(stages, dict) else set()


def _what_is_right(data: dict[str, Any]) -> Pipeline:
    """The stages and settings of an invalid document that are valid by themselves, so that their relations
    can be checked too."""

    def valid(kind: Any, value: Any, default: Any) -> Any:
        try:
            return _adapter(kind).validate_python(value)
        except ValidationError:
            return default

    stages, sources = (
        value if isinstance(value := data.get(name), dict) else {} for name in ("stages", "sources")
    )
    right = {
        name: stage for name, value in stages.items() if (stage := valid(AnyStage, value, None)) is not None
    }
    read = {name: valid(SourceSpec, value, None) for name, value in sources.items()}
    return Pipeline.model_construct(
        name="", launch=valid(Launch, data.get("launch", {}), Launch()), sources=read, stages=right
    )


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The adapter of a type, cached: making that of all stages takes longer than validating one."""
    return TypeAdapter(kind)
