"""The JSON Schema of a pipeline file, made from the models; checked in as `specs/pipeline.schema.json` for
editors.

Invariant: every file that loads is valid, except files with `kind: ${x}` or `filter: ${x}`, since the schema
chooses the fields by their values. A file that extends another, and a stage with a matrix, may leave out
fields that are stated elsewhere. For them each definition has a second form, `Partial...`, in which nothing
is required and null removes a field; items of lists, which are replaced as a whole, are complete in both.
"""

from __future__ import annotations

from typing import Any

from specs.compose.matrix import LISTS_OF_STAGES
from specs.pipeline import Pipeline
from specs.stages import STAGES

_NOTES = ("default", "description", "title", "x-role")
_SEVERAL = {"type": "string", "pattern": r"\*"}
_USE = {"$ref": "#/$defs/Variable"}
_SCALAR = {"type": ["string", "number", "boolean"]}
_EXTENDS = {
    "type": "string",
    "description": "the file that this one changes, relative to it: mappings are merged, null removes",
}
_VARIABLES = {
    "type": "object",
    "description": "names and values; ${name} stands for the value wherever it is written",
}
_MATRIX = {
    "description": (
        "makes several stages of one: names; names and the fields that each changes; or fields and lists of"
        " values"
    ),
    "anyOf": [
        {"type": "array", "minItems": 1, "items": _SCALAR},
        {
            "type": "object",
            "minProperties": 1,
            # null removes a field of the extended file's matrix
            "additionalProperties": {"anyOf": [{"type": "array", "minItems": 1}, {"type": "null"}, _USE]},
        },
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {"anyOf": [{"$ref": "#/$defs/PartialStage"}, {"type": "null"}, _USE]},
        },
        _USE,
    ],
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file in the form that a YAML author writes."""
    pipeline = Pipeline.model_json_schema(by_alias=True, mode="validation")
    models = pipeline.pop("$defs") | {"Pipeline": pipeline}
    # a flavour fills in dimensions
    models["ModelSpec"]["anyOf"] = [
        {"required": ["flavour"]},
        {"required": models["ModelSpec"].pop("required")},
    ]
    # a name alone is the function
    models["RewardSpec"] = {"anyOf": [{"type": "string"}, models["RewardSpec"]]}
    definitions = {name: _schema(model, partial=False) for name, model in models.items()}
    definitions |= {f"Partial{name}": _schema(model, partial=True) for name, model in models.items()}
    partial_stage = {"$ref": "#/$defs/PartialStage"}
    for prefix in ("", "Partial"):
        for stage in STAGES.values():
            definitions[f"{prefix}{stage.__name__}"]["properties"]["matrix"] = {"$ref": "#/$defs/Matrix"}
        definitions[f"{prefix}Pipeline"]["properties"] |= {"extends": _EXTENDS, "variables": _VARIABLES}
    definitions["PartialStage"] = {
        "anyOf": [{"$ref": f"#/$defs/Partial{stage.__name__}"} for stage in STAGES.values()]
    }
    definitions |= {"Matrix": _MATRIX, "Variable": {"type": "string", "pattern": r"\$\{"}}
    stages = definitions["Pipeline"]["properties"]["stages"]["patternProperties"]
    changed = {name: {"anyOf": [partial_stage, {"type": "null"}]} for name in stages}
    definitions["PartialPipeline"]["properties"]["stages"] = {"type": "object", "patternProperties": changed}
    for name, complete in stages.items():
        stages[name] = {"if": {"required": ["matrix"]}, "then": partial_stage, "else": complete}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": definitions,
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"$ref": "#/$defs/PartialPipeline"},
        "else": {"$ref": "#/$defs/Pipeline"},
    }


def _schema(node: dict[str, Any], partial: bool) -> dict[str, Any]:
    """A schema that accepts variables in place of values. A partial one requires nothing and accepts null for
    any field."""
    made: dict[str, Any] = {}
    for key, value in node.items():
        if key == "discriminator" or (partial and key in ("required", "minProperties")):
            continue
        if key in ("properties", "patternProperties"):
            made[key] = {name: _place(_of_stages(name, field), partial) for name, field in value.items()}
        elif key == "additionalProperties" and isinstance(value, dict):
            made[key] = _place(value, partial)
        elif key == "items":
            made[key] = _place(value, partial=False)
        elif key == "prefixItems":
            made[key] = [_place(item, partial=False) for item in value]
        elif key in ("anyOf", "oneOf"):
            made[key] = [_schema(choice, partial) for choice in value]
        elif key == "$ref" and partial:
            made[key] = value.replace("#/$defs/", "#/$defs/Partial")
        else:
            made[key] = value
    return made


def _place(node: dict[str, Any], partial: bool) -> dict[str, Any]:
    """The schema of one place: its value, `${...}`, and null in a partial file."""
    schema = _schema(node, partial)
    notes = {key: schema.pop(key) for key in _NOTES if key in schema}
    choices = next((schema[key] for key in ("anyOf", "oneOf") if set(schema) == {key}), [schema])
    others = []
    kind = len(choices) == 1 and "const" in choices[0]  # a field that chooses a model
    if any(map(_is_value, choices)) and not kind and not any(map(_takes_variables, choices)):
        others.append(_USE)
    if partial and {"type": "null"} not in choices and "const" not in schema:
        others.append({"type": "null"})
    return {**notes, **({"anyOf": [*choices, *others]} if others else schema)}


def _is_value(schema: dict[str, Any]) -> bool:
    """Whether a variable may replace the value: any value but a mapping of free names, such as the stages."""
    return "$ref" in schema or "additionalProperties" in schema or schema.get("type") not in (None, "object")


def _of_stages(name: str, field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field. A list of stages has no minimum length and accepts `*`, since one name can mean
    several stages."""
    if name not in LISTS_OF_STAGES or "items" not in field:
        return field
    return {key: value for key, value in field.items() if key != "minItems"} | {
        "items": {"anyOf": [field["items"], _SEVERAL]}
    }


def _takes_variables(schema: dict[str, Any]) -> bool:
    """Whether the schema already accepts a text with a variable."""
    return schema.get("type") == "string" and not {"pattern", "enum", "const"} & set(schema)
