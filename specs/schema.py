"""The JSON Schema of a pipeline file, made from the models; checked in as `specs/pipeline.schema.json` for editors."""

from __future__ import annotations

from typing import Any

from specs.pipeline import Pipeline


def json_schema() -> dict[str, Any]:
    """Draft 2020-12, in the form that a YAML author writes."""
    schema = Pipeline.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
