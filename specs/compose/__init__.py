"""Composition of pipeline files: resolves `extends`, `variables` and `matrix` into the plain document that is
checked.

Invariants: the composed document has none of the three, and every value in it has its origin: file and line,
or the `--set`, and the variable if there is one. Only the models know what fields mean; composition sees
only structure. A part that cannot be composed is recorded in the document with its place, so that the checks
report it together with all other problems.

The order: files are merged, overrides applied (those of variables first), stages with a matrix expanded,
variables filled in.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from specs.compose.matrix import Matrices, lists_of_stages
from specs.compose.values import merge, plain_document, texts_of, tree
from specs.compose.variables import Variables
from specs.document import Document, nearest_file, override, parse, read, stage_of
from specs.errors import FieldPath, Problem, SpecError
from specs.foreign import shown
from specs.redaction import mask_url


def compose(path: str | Path, overrides: Iterable[str] = ()) -> Document:
    """The composed document of a file. Raises SpecError for a file that cannot be read; the document lists
    other problems."""
    return expand(extended(path), overrides)


def keywords(path: FieldPath) -> tuple[str, ...]:
    """The keywords that are accepted at a path of a file besides the fields of the models."""
    if not path:
        return ("extends", "variables")
    return ("matrix",) if path[0] == "stages" and len(path) == 2 else ()


def distinct(document: Document, problems: Iterable[Problem]) -> list[Problem]:
    """The problems of composition and those found later, without those about unknown values; a mistake that
    the variants of a stage share is reported once."""
    stage = {variant: name for name, variants in document.variants.items() for variant in variants}
    known = [
        problem
        for problem in problems
        if not any(problem.path[: len(path)] == path for path in document.unknown)
    ]
    first: dict[Any, Problem] = {}
    for problem in [*document.problems, *known]:
        path = problem.path
        if path[:1] == ("stages",) and len(path) > 1:
            path = ("stages", stage.get(str(path[1]), path[1]), *path[2:])
        first.setdefault((path, problem.where, problem.message, problem.fix), problem)
    return list(first.values())


def extended(path: str | Path, text: str | None = None) -> Document:
    """A file merged over the chain of files that it extends; `text`: its content, if it is not written yet.
    Raises SpecError for a file that cannot be read, and for a cycle."""
    files, documents = [Path(path)], [read(path) if text is None else parse(text, str(path))]
    while "extends" in documents[-1].data:
        file, document = files[-1], documents[-1]
        at: FieldPath = ("extends",)
        named, where = document.data.pop("extends"), document.where(at)
        if not isinstance(named, str) or not named:
            raise SpecError.of(
                at, f"{shown(named)} is not a file", "name one file, relative to this one.", where
            )
        if "://" in named:
            fix = "copy it here, and name the copy."
            raise SpecError.of(at, f"'{mask_url(named)}' is a URL, not a file", fix, where)
        base = file.parent / named
        if not os.path.isfile(base):
            raise SpecError.of(at, f"there is no file '{base}'", nearest_file(base, file), where)
        for index, other in enumerate(files):
            if other.exists() and os.path.samefile(base, other):
                cycle = " -> ".join(map(str, [*files[index:], base]))
                raise SpecError.of(
                    at, f"the files extend each other: {cycle}", "let one of them extend none.", where
                )
        files.append(base)
        documents.append(read(base))
    problems: list[Problem] = []
    root = tree(documents.pop())
    while documents:
        root = merge(root, tree(documents.pop()), (), problems)
    merged = plain_document(str(path), root)
    merged.problems = problems
    return merged


def expand(document: Document, overrides: Iterable[str] = ()) -> Document:
    """The document of one merged file with overrides applied, stages with a matrix expanded and variables
    filled in."""
    problems, of_variants = list(document.problems), []
    written = list(texts_of(tree(document)))
    for assignment in sorted(
        overrides, key=lambda assignment: not assignment.strip().startswith("variables.")
    ):
        if (
            assignment.startswith("stages.")
            and stage_of(document, assignment.partition("=")[0].strip()) is None
            and _matrices(document)
        ):
            of_variants.append(assignment)  # a variant exists under its own name only after expansion
        else:
            problems += _override(document, assignment)
    if "extends" in document.data:
        where = document.where(("extends",))
        message = "files are merged before overrides are applied"
        problems.append(Problem(("extends",), message, "set it in the file.", where))
        del document.data["extends"]
    root = tree(document)
    variables = Variables(root.content.get("variables"))
    variants: dict[str, list[str]] = {}
    stages = root.content.get("stages")
    if stages is not None and isinstance(stages.content, dict):
        matrices = Matrices(variables, stages)
        variants = matrices.variants
        root = replace(root, content=root.content | {"stages": replace(stages, content=matrices.expanded())})
    raw = plain_document(document.name, root.without("variables"))
    raw.variants = variants
    for assignment in of_variants:
        problems += _override(raw, assignment, document)
    texts = [*texts_of(root), *of_variants, *(texts_of(stages) if stages is not None else ())]
    composed = plain_document(document.name, lists_of_stages(variables.fill(tree(raw), ()), variants))
    composed.variants = variants
    composed.problems = [*problems, *variables.problems, *variables.unused(written, texts, document.name)]
    composed.unknown = variables.unknown
    return composed


def _override(document: Document, assignment: str, variables: Document | None = None) -> list[Problem]:
    try:
        override(document, assignment, variables)
    except SpecError as error:
        return error.problems
    return []


def _matrices(document: Document) -> list[str]:
    stages = document.data.get("stages")
    if isinstance(stages, dict):
        return [name for name, stage in stages.items() if isinstance(stage, dict) and "matrix" in stage]
    return []
