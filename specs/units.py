"""Quantities with their units: budgets (tokens, samples, steps), durations, references to stages.

Invariant: a quantity is exact. `7.038T tokens` is the integer 7,038,000,000,000; a value that is not a whole
number of its unit is refused, and so is a number without a unit where the unit is ambiguous.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic_core import CoreSchema, core_schema

from specs.foreign import shown

Unit = Literal["tokens", "samples", "steps"]
HUGGING_FACE = "hf:"
MAGNITUDES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
LARGEST = 2**63 - 1  # limit of all integers of a recipe: indices, sizes and counts of 64 bits
LONGEST_DURATION = 3650 * 86_400  # seconds
MOST_CHARACTERS = 40  # limit of the text of an amount
HELD_OUT = r"val_loss(/[A-Za-z0-9][A-Za-z0-9_./-]*)?"  # a held-out loss that checkpoints are compared by
AMOUNTS = "write for example '15T tokens', '4_096_000 samples' or '2.6M steps'"
_AMOUNT = re.compile(
    r"^\s*(?P<number>\d[\d_]*(?:\.[\d_]+)?)\s*(?P<magnitude>[kKMBGT]?)\s*(?P<unit>[a-z]*)\s*$"
)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def _amount(text: str) -> tuple[int, str, str]:
    match = _AMOUNT.match(text)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"{shown(text)} has more than {MOST_CHARACTERS} characters; write for example '15T tokens'"
        )
    if not match:
        raise ValueError(f"'{text}' is not an amount; {AMOUNTS}")
    exact = Decimal(match["number"].replace("_", "")) * MAGNITUDES[match["magnitude"]]
    if exact != exact.to_integral_value():
        raise ValueError(f"'{text}' is {exact}, which is not a whole number")
    if exact > LARGEST:
        raise ValueError(f"'{text}' is more than {LARGEST}, the largest amount that can be counted")
    return int(exact), match["unit"], match["magnitude"]


class _FromText:
    """The Pydantic schema of a value class that is text in YAML: `parse` reads it, `str` writes it."""

    _pattern: str

    @classmethod
    def parse(cls, value: Any) -> Self:
        """The quantity that a text states. ValueError for anything else."""
        return value if isinstance(value, cls) else cls._parsed(value)

    @classmethod
    def _parsed(cls, value: Any) -> Self:
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(
                str, return_schema=core_schema.str_schema()
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": cls._pattern, "description": (cls.__doc__ or "").split("\n")[0]}


@dataclass(frozen=True)
class Budget(_FromText):
    """An amount of training: `15T tokens`, `4_096_000 samples` (sequences), `2.6M steps`. A bare `15T`
    means tokens."""

    amount: int
    unit: Unit

    _pattern = r"^\s*\d[\d_]*(\.[\d_]+)?\s*([kKMBGT]?\s*(tokens?|samples?|steps?)|[kKMBGT])\s*$"

    @classmethod
    def _parsed(cls, value: Any) -> Self:
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError(
                f"{value} has no unit; write for example '{value} steps', '{value} samples' or '{value}"
                " tokens'"
            )
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} is not an amount; {AMOUNTS}")
        amount, unit, magnitude = _amount(value)
        if not unit and magnitude:
            unit = "tokens"
        if not unit:
            raise ValueError(
                f"'{value}' has no unit; write '{value} steps', '{value} samples' or '{value} tokens'"
            )
        if unit not in ("token", "tokens", "sample", "samples", "step", "steps"):
            raise ValueError(f"'{unit}' is not a unit of training; use tokens, samples or steps")
        return cls(amount, unit if unit.endswith("s") else unit + "s")  # type: ignore[arg-type]  # checked

    def __str__(self) -> str:
        return f"{self.amount} {self.unit}"


@dataclass(frozen=True)
class Duration(_FromText):
    """A time span: `90s`, `30m`, `2h`, `1d`."""

    seconds: float

    _pattern = r"^\s*\d+(\.\d+)?\s*(s|m|min|h|d)\s*$"

    @classmethod
    def _parsed(cls, value: Any) -> Self:
        match = re.match(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*$", value) if isinstance(value, str) else None
        if not match or match[2] not in _SECONDS:
            raise ValueError(
                f"{shown(value)} is not a duration; write for example '90s', '30m', '2h' or '1d'"
            )
        if (seconds := float(match[1]) * _SECONDS[match[2]]) > LONGEST_DURATION:
            raise ValueError(
                f"{shown(value)} is longer than {LONGEST_DURATION // 86_400} days, the longest duration"
            )
        return cls(seconds)

    def __str__(self) -> str:
        return f"{self.seconds:g}s"


def _count(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    number, unit, _ = _amount(value)
    if unit:
        raise ValueError(f"'{value}' has a unit; write for example 20k or 20_000")
    return number


Count = Annotated[int, BeforeValidator(_count, json_schema_input_type=int | str)]
"""A whole number, also as text with a magnitude: `20k`."""


def _positive(duration: Duration) -> Duration:
    if duration.seconds <= 0:
        raise ValueError(f"a duration of {duration} leaves no time; set a longer one")
    return duration


PositiveDuration = Annotated[Duration, AfterValidator(_positive)]


@dataclass(frozen=True)
class ByteSize(_FromText):
    """An amount of memory: `4GiB`, `512MiB`, `64KiB`."""

    bytes: int

    _pattern = r"^\s*[1-9]\d{0,8}\s*[KMGT]iB\s*$"

    @classmethod
    def _parsed(cls, value: Any) -> Self:
        if not isinstance(value, str) or not re.match(cls._pattern, value):
            raise ValueError(
                f"{shown(value)} is not an amount of memory; write for example '4GiB' or '512MiB'"
            )
        number, unit = value.strip()[:-3], value.strip()[-3]
        return cls(int(number) << {"K": 10, "M": 20, "G": 30, "T": 40}[unit])

    def __str__(self) -> str:
        shift = next(shift for shift in (40, 30, 20, 10) if self.bytes % (1 << shift) == 0)
        return f"{self.bytes >> shift}{ {10: 'K', 20: 'M', 30: 'G', 40: 'T'}[shift] }iB"


@dataclass(frozen=True)
class Reference(_FromText):
    """Another stage of the spec: `pretrain`, `corpus/code` (one part), `pretrain@step=1200`,
    `pretrain@tokens=7.0T`, `pretrain@last` (the same as `pretrain`), `sft@best:val_loss` or
    `sft@best:val_loss/<source>` (the kept checkpoint with the lowest held-out loss). Where a model is wanted,
    also a Hugging Face model: `hf:<folder>`, `hf:<owner>/<name>` or `hf:<owner>/<name>@<revision>`, which is
    kept whole in `stage`."""

    stage: str  # name of a stage, or the whole reference to a Hugging Face model
    part: str | None = None  # the part after `/`
    step: int | None = None  # the number after `@step=`
    tokens: int | None = None  # the amount after `@tokens=`
    best: str | None = None  # the metric after `@best:`

    _pattern = (
        r"^hf:\S.*$|"
        r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?"
        r"(@(last|step=[\d_]+|tokens=[\d_.]+[kKMBGT]?|best:" + HELD_OUT + r"))?$"
    )

    @classmethod
    def _parsed(cls, value: Any) -> Self:
        if not isinstance(value, str) or not re.match(cls._pattern, value):
            raise ValueError(
                f"{shown(value)} is not a reference to a stage; write for example 'pretrain', 'corpus/code',"
                " 'pretrain@step=1200', 'pretrain@tokens=7.0T', 'sft@best:val_loss' or, for a model of"
                " Hugging Face, 'hf:folder'"
            )
        if value.startswith(HUGGING_FACE):
            return cls(value)
        target, _, selector = value.partition("@")
        stage, _, part = target.partition("/")
        step = _amount(selector.removeprefix("step="))[0] if selector.startswith("step=") else None
        tokens = _amount(selector.removeprefix("tokens="))[0] if selector.startswith("tokens=") else None
        best = selector.removeprefix("best:") if selector.startswith("best:") else None
        return cls(stage, part or None, step, tokens, best)

    @property
    def hugging_face(self) -> str | None:
        """The text after `hf:`; None for a reference to a stage."""
        return self.stage.removeprefix(HUGGING_FACE) if self.stage.startswith(HUGGING_FACE) else None

    @property
    def target(self) -> str:
        """The named stage or part, without the step: `pretrain`, `long-context/1`."""
        return self.stage + (f"/{self.part}" if self.part else "")

    @property
    def selector(self) -> str:
        """The selector of the step: `step=1200`, `tokens=7000`, `best:val_loss`; "" for the last one."""
        if self.step is not None:
            return f"step={self.step}"
        if self.best is not None:
            return f"best:{self.best}"
        return f"tokens={self.tokens}" if self.tokens is not None else ""

    def __str__(self) -> str:
        return f"{self.target}@{self.selector}" if self.selector else self.target


def _is_reference(text: str) -> str:
    Reference.parse(text)
    return text


T = TypeVar("T")
REST: Final = "rest of parent"
Rest = Literal["rest of parent"]
OrRest = Annotated[
    Annotated[T, Tag("stated")] | Annotated[Rest, Tag("rest")],
    Discriminator(lambda value: "rest" if value == REST else "stated"),
]
"""A value, or `rest of parent`: what the parent would have done after the point where the stage starts."""

ReferenceText = Annotated[str, AfterValidator(_is_reference)]
"""A reference kept as it is written, for keys and values of mappings."""
