"""The JSON Schema of a pipeline file, made from the models; checked in as `specs/pipeline.schema.json` for
editors.

Invariant: every file that loads is valid, except files with `kind: ${x}` or `filter: ${x}`, since the schema
chooses the fields by their values. A file that extends another, and a stage with a matrix, may leave out
fields that are stated elsewhere. For them each definition has a second form, `Partial...`, in which nothing
is required and null removes a field; items of lists, which are replaced as a whole, are complete in both.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specs.compose.matrix import LISTS_OF_STAGES
from specs.pipeline import Pipeline
from specs.stages import STAGES

_EDITOR_LINE = "# yaml-language-server: $schema="
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
_MATRIX = (
    "makes several stages of one: names; names and the fields that each changes; or fields and lists of"
    " values. A list under $name makes a variable of each variant, ${name}"
)


def with_editor_line(text: str) -> str:
    """The text of a recipe, begun by the line by which editors find the schema of this installation, wherever
    the recipe lies."""
    file = Path(__file__).with_name("pipeline.schema.json")
    rest = text.partition("\n")[2] if text.startswith(_EDITOR_LINE) else text
    return f"{_EDITOR_LINE}{file.as_uri()}\n{rest}"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file in the form that a YAML author writes."""
    pipeline = Pipeline.model_json_schema(by_alias=True, mode="validation")
    models = pipeline.pop("$defs") | {"Pipeline": pipeline}
    # a flavour fills in dimensions
    models["ModelSpec"]["anyOf"] = [
        {"required": ["flavour"]},
        {"required": models["ModelSpec"].pop("required")},
    ]
    definitions = {name: _schema(model, partial=False) for name, model in models.items()}
    definitions |= {f"Partial{name}": _schema(model, partial=True) for name, model in models.items()}
    for prefix in ("", "Partial"):
        for stage in STAGES.values():
            definitions[f"{prefix}{stage.__name__}"]["properties"]["matrix"] = {"$ref": "#/$defs/Matrix"}
        definitions[f"{prefix}Pipeline"]["properties"] |= {"extends": _EXTENDS, "variables": _VARIABLES}
    kinds = {kind: stage.__name__ for kind, stage in STAGES.items()}
    whole, partial = {"$ref": "#/$defs/Stage"}, {"$ref": "#/$defs/PartialStage"}
    null = {"type": "null"}
    names = definitions["Pipeline"]["properties"]["stages"]["patternProperties"]
    definitions["PartialPipeline"]["properties"]["stages"] = {
        "type": "object",
        "patternProperties": {name: _union([partial, null]) for name in names},
    }
    for name in names:
        names[name] = {"if": {"required": ["matrix"]}, "then": partial, "else": whole}
    # null removes a field of the extended file's matrix
    fields = _union([{"type": "array", "minItems": 1}, partial, null, _USE])
    variants = {"type": "object", "minProperties": 1, "additionalProperties": fields}
    listed = {"type": "array", "minItems": 1, "items": _SCALAR}
    definitions |= {
        "Stage": _tagged("kind", kinds, partial=False),
        "PartialStage": _tagged("kind", kinds, partial=True) | {"else": _any_of(kinds, definitions)},
        "Matrix": {"description": _MATRIX} | _union([listed, variants, _USE]),
        "Variable": {"type": "string", "pattern": r"\$\{"},
    }
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
    schema: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("required", "minProperties", "anyOf") and partial:
            continue
        if key in ("properties", "patternProperties"):
            schema[key] = {name: _place(_of_stages(name, field), partial) for name, field in value.items()}
        elif key == "additionalProperties" and isinstance(value, dict):
            schema[key] = _place(value, partial)
        elif key == "items":
            schema[key] = _place(value, partial=False)
        elif key == "prefixItems":
            schema[key] = [_place(item, partial=False) for item in value]
        elif key == "$ref" and partial:
            schema[key] = value.replace("#/$defs/", "#/$defs/Partial")
        else:
            schema[key] = value
    return schema


def _place(node: dict[str, Any], partial: bool) -> dict[str, Any]:
    """The schema of one place: its value, `${...}`, and null in a partial file."""
    choices = list(_choices({key: value for key, value in node.items() if key not in _NOTES}, partial))
    others = []
    kind = len(choices) == 1 and "const" in choices[0]  # a field that chooses a model
    if any(map(_is_value, choices)) and not kind and not any(map(_takes_variables, choices)):
        others.append(_USE)
    if partial and {"type": "null"} not in choices and not any("const" in choice for choice in choices):
        others.append({"type": "null"})
    return {key: node[key] for key in _NOTES if key in node} | _union([*choices, *others])


def _choices(node: dict[str, Any], partial: bool) -> Iterator[dict[str, Any]]:
    """The schemas of the values that a place may have, of which one at most is that of an object with
    fields."""
    if "discriminator" in node:
        models = {tag: ref.rpartition("/")[2] for tag, ref in node["discriminator"]["mapping"].items()}
        yield _tagged(node["discriminator"]["propertyName"], models, partial)
    elif choices := node.get("anyOf") or node.get("oneOf"):
        for choice in choices:
            yield from _choices(choice, partial)
    else:
        if node.get("$ref") == "#/$defs/RewardSpec":
            yield {"type": "string"}  # the name of a function
        yield _schema(node, partial)


def _union(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """One of some schemas. The type of the value chooses that of an object or a list, so that a mistake
    inside is an error of its own place, and not of the whole value."""
    if len(choices) == 1:
        return choices[0]
    rest: dict[str, Any] = {
        "anyOf": [choice if _type(choice) is None else {"type": _type(choice)} for choice in choices]
    }
    for kind in ("array", "object"):
        of_kind = [choice for choice in choices if _type(choice) == kind]
        if of_kind:
            rest = {
                "if": {"type": kind},
                "then": of_kind[0] if len(of_kind) == 1 else {"anyOf": of_kind},
                "else": rest,
            }
    return rest


def _type(schema: dict[str, Any]) -> str | None:
    """`object` or `array`; None for a schema of single values."""
    kind = "object" if "$ref" in schema and schema != _USE else schema.get("type")
    return kind if kind in ("object", "array") else None


def _tagged(tag: str, models: dict[str, str], partial: bool) -> dict[str, Any]:
    """An object whose field `tag` says which of the models it is. A partial one without it may be any."""
    refs = {value: {"$ref": f"#/$defs/{'Partial' * partial}{name}"} for value, name in models.items()}
    return {
        "type": "object",
        "properties": {tag: {"enum": list(models)}},
        **({} if partial else {"required": [tag]}),
        "if": {"required": [tag]},
        "then": {
            "allOf": [
                {"if": {"properties": {tag: {"const": value}}}, "then": ref} for value, ref in refs.items()
            ]
        },
        "else": {"anyOf": list(refs.values())} if partial else True,
    }


def _any_of(models: dict[str, str], definitions: dict[str, Any]) -> dict[str, Any]:
    """An object with fields of any of the partial models."""
    fields: dict[str, list[Any]] = {}
    for name in models.values():
        for field, schema in definitions[f"Partial{name}"]["properties"].items():
            known = fields.setdefault(field, [])
            known += [schema] * (schema not in known)
    properties = {
        field: schemas[0] if len(schemas) == 1 else {"anyOf": schemas} for field, schemas in fields.items()
    }
    return {"properties": properties, "additionalProperties": False}


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
