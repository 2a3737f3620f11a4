"""Loads a YAML file as a checked recipe. All problems of a file are reported at once."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specs.checks import check
from specs.compose import compose, distinct, keywords
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
    data, problems = document.data, list[Problem]()
    try:
        pipeline = located(Pipeline.model_validate(data), document)
    except ValidationError as error:
        problems = explain(Pipeline, document, error, keywords)
        if not (isinstance(data.get("stages"), dict) and isinstance(data.get("sources", {}), dict)):
            raise SpecError(distinct(document, problems)) from None
        pipeline = _what_is_right(data)
    pipeline._document = document
    launches = not any(problem.path[:1] == ("launch",) for problem in problems)
    wrong = check(pipeline, set(data["stages"]), launches)
    problems += [replace(problem, where=document.where(problem.path)) for problem in wrong]
    problems = distinct(document, problems)
    if problems:
        raise SpecError(problems)
    return pipeline


def _what_is_right(data: dict[str, Any]) -> Pipeline:
    """The stages and settings of an invalid document that are valid by themselves, so that their relations
    can be checked too."""

    def valid(kind: Any, value: Any, default: Any) -> Any:
        try:
            return _adapter(kind).validate_python(value)
        except ValidationError:
            return default

    stages = {name: valid(AnyStage, value, None) for name, value in data["stages"].items()}
    return Pipeline.model_construct(
        name="",
        launch=valid(Launch, data.get("launch", {}), Launch()),
        sources={name: valid(SourceSpec, value, None) for name, value in data.get("sources", {}).items()},
        stages={name: stage for name, stage in stages.items() if stage is not None},
    )


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The adapter of a type, cached: making that of all stages takes longer than validating one."""
    return TypeAdapter(kind)
