"""A judge: a language model that is asked how well a completion follows a constitution, a file with numbered
clauses.

Invariant: a score is identified by what the judge is asked and by the model that answers: the content of the
constitution, the texts, the scale, and the content of the model's folder, or the name and revision of the
model that a server has.
"""

import re
from collections.abc import Collection, Iterator
from typing import Literal

from pydantic import field_validator

from specs.base import Spec, identity, location, option, reference
from specs.server import Server
from specs.sources import Url
from specs.units import Reference

CLAUSE = re.compile(
    r"^[ \t]*(?:[-*][ \t]+)?(?:\[(?P<bracketed>\d+(?:\.\d+)*)\]|(?P<plain>\d+(?:\.\d+)+|\d+(?=[.)]))[.)]?)"
    r"[ \t]+(?P<text>\S.*)$"
)
QUESTION = """\
The clauses below say what a good answer is.

{constitution}

A user wrote:

{prompt}

An assistant answered:

{completion}

How well does the answer follow the clauses? Reply with one number from {lowest} (not at all) to {highest} \
(in every way) and with nothing else."""
COMPARISON = """\
The clauses below say what a good answer is.

{constitution}

A user wrote:

{prompt}

Answer A:

{first}

Answer B:

{second}

Which answer follows the clauses better? Reply with A or B and with nothing else."""
FIELD = re.compile(r"\{(\w+)\}")
SCORED = ("constitution", "prompt", "completion")
COMPARED = ("constitution", "prompt", "first", "second")


def clauses(text: str) -> dict[str, str]:
    """The clauses of a constitution by their numbers. A clause begins on a line of its own with its number
    (`[2.1] ...`, `2.1 ...` or `2. ...`) and ends before the next one or an empty line.

    Raises ValueError if there is none, or if a number occurs twice.
    """
    parts_of: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    current: list[str] | None = None
    for index, line in enumerate(text.splitlines(), start=1):
        if (match := CLAUSE.match(line)) is not None:
            number = match["bracketed"] or match["plain"]
            if number in parts_of:
                raise ValueError(f"clause {number} is on line {lines[number]} and again on line {index}")
            lines[number] = index
            current = parts_of[number] = [match["text"].strip()]
        elif not line.strip():
            current = None
        elif current is not None:
            current.append(line.strip())
    if not parts_of:
        raise ValueError("no line begins with the number of a clause")
    return {number: " ".join(parts) for number, parts in parts_of.items()}


def _check_template(text: str, needed: Collection[str], known: Collection[str]) -> str:
    """Returns the template. Raises ValueError if it has unknown fields, or lacks those that it needs."""
    fields = FIELD.findall(text)
    if unknown := [field for field in fields if field not in known]:
        raise ValueError(f"there is no field {{{unknown[0]}}}; the fields are {', '.join(known)}")
    if missing := [field for field in needed if field not in fields]:
        raise ValueError(f"the text does not have the field {{{missing[0]}}}; add it")
    return text


class Pairwise(Spec):
    """A comparison of the completions with the highest scores, two by two and in both orders."""

    best: int = identity(5, ge=2, le=100, description="number of completions of a prompt that are compared")
    template: str = identity(
        COMPARISON,
        description="text of the question, with the fields {constitution}, {prompt}, {first}, {second}",
    )

    @field_validator("template")
    @classmethod
    def _asks_for_two(cls, text: str) -> str:
        return _check_template(text, COMPARED, COMPARED)


class Judge(Spec):
    """A model that is asked for one number on a scale. The score is the expectation of the number under the
    model's probabilities at the first token of the reply, divided by the probability of the whole scale:
    sum(k p(k)) / sum(p(k)) (arXiv 2509.14233, section 4.3.2). A token also counts as a number with spaces
    around it or in full width. An empty completion gets the lowest score without a question."""

    from_: Reference | None = reference(
        None,
        alias="from",
        to="checkpoint",
        description="the model: `hf:` with any causal language model, or a checkpoint; asked by its chat"
        " template",
    )
    engine: Literal["transformers", "vllm"] = option(
        "transformers",
        description="engine for the model of `from`; transformers: on one GPU or none; vllm: in bfloat16, in"
        " a separate environment, on launch.parallel.tp GPUs",
    )
    server: Server | None = option(
        None,
        description="server that answers in place of `from`, with `api: chat`; it must return"
        " log-probabilities of the best tokens",
    )
    revision: str | None = option(None, min_length=1, description="revision of the model that the server has")
    chat_template_kwargs: dict[str, bool | str] = identity(
        default_factory=dict,
        description="arguments for the chat template, such as enable_thinking: false, so that the reply"
        " begins at once",
    )
    constitution: Url = location(
        description="file (any fsspec URL) with numbered clauses: `[2.1] ...`, `2.1 ...` or `2. ...` at the"
        " begin of a line. Its content is identity"
    )
    template: str = identity(
        QUESTION,
        description="text of the question, with the fields {constitution}, {prompt}, {completion}, {lowest},"
        " {highest}",
    )
    scale: tuple[int, int] = identity((1, 9), description="lowest and highest number; digits from 0 to 9")
    pairwise: Pairwise | None = option(
        None,
        description="the best completions are also compared two by two, each pair in both orders; their"
        " scores are given again, in the order of the mean probability to be preferred",
    )

    @field_validator("template")
    @classmethod
    def _asks_for_one(cls, text: str) -> str:
        return _check_template(text, SCORED, (*SCORED, "lowest", "highest"))

    @field_validator("scale")
    @classmethod
    def _of_digits(cls, scale: tuple[int, int]) -> tuple[int, int]:
        lowest, highest = scale
        if not 0 <= lowest < highest <= 9:
            raise ValueError(f"[{lowest}, {highest}] is not a scale of digits; use one such as [1, 9]")
        return scale

    def conflicts(self) -> Iterator[str]:
        if (self.from_ is None) == (self.server is None):
            yield "a judge is a model or a server; set one of from, server"
        if self.server is not None and self.engine != "transformers":
            yield "engine applies to the model of `from`; leave it out for a server"
        if self.server is not None and self.server.api != "chat":
            yield "a server is asked by its own chat template; set server.api: chat"
        if (self.server is None) != (self.revision is None):
            yield (
                "revision says which model a server has under its name: set it with server, and leave it"
                " out with from, whose files are known"
            )

    @property
    def numbers(self) -> list[int]:
        return list(range(self.scale[0], self.scale[1] + 1))
