"""The base of every spec: strict Pydantic models whose fields declare their role.

Invariants:
- Every field of a `Spec` is declared as one of three roles. `identity`: it changes the result, so it is part
  of the fingerprint. `execution`: it says where and how, is recorded in the manifest, and never enters a
  fingerprint. `reference`: it names another stage; the planner replaces it with the fingerprint of what it
  names. A field without a role is an error when the class is made.
- An identity field whose value equals its declared `neutral` is left out, so adding an option invalidates
  nobody's store.
- The encoder refuses a value that has no stable form. There is no `str()` fallback.
- No field holds a URL with credentials: specs are stored, shown and handed to other processes.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticUndefined
from pydantic_core.core_schema import no_info_after_validator_function, no_info_before_validator_function

from specs.redaction import without_credentials
from specs.units import Budget, Reference

Role = Literal["identity", "execution", "reference"]
FINGERPRINT_FORMAT = 1  # `apertus verify` recomputes stored fingerprints, and knows this format only


@dataclass(frozen=True, eq=False)
class Facts:
    """What a field declares besides its type."""

    role: Role
    neutral: Any = PydanticUndefined  # the value that is not hashed, if there is one
    location: bool = False  # whether it has paths
    results: tuple[str, ...] = ()  # that the stages it names may have; empty if it names no stage


def _field(facts: Facts, default: Any, options: dict[str, Any]) -> Any:
    if "default_factory" not in options:
        options["default"] = default
    info: FieldInfo = Field(json_schema_extra={"x-role": facts.role}, **options)
    info.metadata.append(facts)
    return info


class _Checked:
    """The mark of a field whose numbers are not true or false, and which holds no URL with credentials: that
    is checked last."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        of_model = isinstance(source, type) and issubclass(source, BaseModel)
        without_texts = of_model or schema["type"] in ("bool", "int", "float", "literal")
        schema = _with_numbers(schema)
        return schema if without_texts else no_info_after_validator_function(_checked, schema)


def _with_numbers(schema: Any) -> Any:
    """The schema of a field in which every number, but for those of models, is checked by `_number`."""
    if schema["type"] in ("int", "float"):
        return no_info_before_validator_function(_number, schema)
    if schema["type"] != "model":
        for key in ("schema", "items_schema", "keys_schema", "values_schema"):
            if isinstance(schema.get(key), dict):
                schema[key] = _with_numbers(schema[key])
        if schema["type"] == "union":
            schema["choices"] = [_with_numbers(choice) for choice in schema["choices"]]
        if schema["type"] == "tagged-union":
            schema["choices"] = {tag: _with_numbers(choice) for tag, choice in schema["choices"].items()}
        if schema["type"] == "tuple":
            schema["items_schema"] = [_with_numbers(item) for item in schema["items_schema"]]
    return schema


def _number(value: Any) -> Any:
    """Pydantic would take true for 1."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number; write a number")
    return value


def _checked(value: Any) -> Any:
    for text in _texts(value):
        without_credentials(text)
    return value


def identity(default: Any = PydanticUndefined, *, neutral: Any = PydanticUndefined, **options: Any) -> Any:
    """A field that changes the result; part of the fingerprint unless its value equals `neutral`."""
    return _field(Facts("identity", neutral), default, options)


def option(default: Any = PydanticUndefined, **options: Any) -> Any:
    """An identity field whose default is neutral, so that adding it invalidates nobody's store."""
    if (factory := options.get("default_factory")) is not None:
        default = factory()
    else:
        options["default"] = default
    return identity(neutral=default, **options)


def execution(default: Any = PydanticUndefined, **options: Any) -> Any:
    """A field that says where or how; recorded, never part of a fingerprint."""
    return _field(Facts("execution"), default, options)


def location(default: Any = PydanticUndefined, **options: Any) -> Any:
    """An execution field with paths or URLs. A relative path begins in the folder of the file that states
    it (`specs.locations`)."""
    return _field(Facts("execution", location=True), default, options)


def reference(default: Any = PydanticUndefined, *, to: str | tuple[str, ...] = (), **options: Any) -> Any:
    """A field that names other stages or sources; the planner turns it into inputs with fingerprints.
    `to`: the results (`Stage.result`) that the named stages may have; empty for a field that names no
    stage."""
    results = (to,) if isinstance(to, str) else to
    return _field(Facts("reference", results=results), default, options)


class Strict(BaseModel):
    """An immutable model without unknown fields. Pydantic builds it when it is first used: a command uses few
    models."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Spec(Strict):
    """A model whose fields have roles. `identity_fields()` returns the fields that enter a fingerprint."""

    model_config = ConfigDict(populate_by_name=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, info in cls.model_fields.items():
            facts_of(cls, name)
            if _Checked not in info.metadata:
                info.metadata.append(_Checked)  # before the class is built

    def conflicts(self) -> Iterator[str]:
        """Yields why fields do not fit together, with the fix; only the first reason is reported. A class
        states its own reasons, without super(): those of its bases come before."""
        yield from ()

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for kind in reversed(type(self).__mro__):
            for reason in vars(kind)["conflicts"](self) if "conflicts" in vars(kind) else ():
                raise ValueError(reason)
        return self

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values, named as in a recipe."""
        return self.model_dump(mode="json", by_alias=True)

    def stated(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}

    def identity_fields(self) -> dict[str, Any]:
        """The identity fields as plain JSON values, without those that have their neutral value."""
        values: dict[str, Any] = {}
        for name in type(self).model_fields:
            if (facts := facts_of(type(self), name)).role != "identity":
                continue
            value = encode(getattr(self, name))
            if facts.neutral is PydanticUndefined or value != encode(facts.neutral):
                values[name] = value
        return values


def _texts(value: Any) -> Iterator[str]:
    """The texts in the value of a field. Specs inside it are skipped, since they check their own fields."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, (str, Reference)):
        yield str(value)


def facts_of(cls: type[BaseModel], name: str) -> Facts:
    """What a field declares. Raises TypeError if it has no role."""
    for mark in cls.model_fields[name].metadata:
        if isinstance(mark, Facts):
            return mark
    functions = "identity(), execution() or reference() from specs.base"
    raise TypeError(f"{cls.__name__}.{name} declares no role: use {functions}")


def encode(value: Any) -> Any:
    """A stable JSON form of an identity value. Raises TypeError for a type that has none, and ValueError for
    NaN and infinities."""
    if isinstance(value, Spec):
        return value.identity_fields()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be part of a fingerprint")
        return value
    if isinstance(value, Budget):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(
                "a mapping with keys that are not text cannot be part of a fingerprint:"
                f" {sorted(map(repr, value))}"
            )
        return {key: encode(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} has no stable form for a fingerprint")


def canonical_json(value: Any) -> str:
    """JSON with one spelling per value: sorted keys, no spaces, ASCII, shortest round-trip floats."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def fingerprint(kind: str, version: int, fields: dict[str, Any], inputs: dict[str, str]) -> str:
    """128 bits of SHA-256, as 32 hex digits, over kind, version of the kind, identity fields and the
    inputs' fingerprints."""
    document = {
        "format": FINGERPRINT_FORMAT,
        "kind": kind,
        "version": version,
        "spec": fields,
        "inputs": inputs,
    }
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()[:32]


def hashed_input(fingerprint: str, step: int | None) -> str:
    """The form of an input in the fingerprint of what is made from it. `step`: that of a checkpoint."""
    return fingerprint if step is None else f"{fingerprint}@{step}"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as `{"optimizer.lr": 1e-4, "betas[0]": 0.9}`, for comparing specs field by
    field."""
    if isinstance(value, dict):
        items = [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{prefix}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat.update(flatten(item, key))
    return flat
