"""Checks of sources in rows, by the rows that a run would read until the first document.

Invariant: only sources that a pending part reads are opened, and of these only the first file.
"""

from collections.abc import Iterator
from itertools import islice

from flows.planning.plan import Plan
from infra.store.inputs import SourceError
from specs.errors import Problem, SpecError
from specs.sources import TABLES, SourceSpec


def check_sources(plan: Plan) -> None:
    """SpecError if the first file of a source cannot be read, or lacks a column that the recipe names."""
    if problems := list(_problems(plan)):
        raise plan.pipeline.located(SpecError(problems))


def _problems(plan: Plan) -> Iterator[Problem]:
    pending = {
        input_.name for step in plan.pending for input_ in step.node.inputs.values() if input_.node is None
    }
    for name, source in plan.pipeline.sources.items():
        listing = plan.graph.listings.get(name)
        if name not in pending or listing is None or source.format not in TABLES:
            continue
        from apertus_model.data.documents.parsed import SourceDocument
        from apertus_model.data.documents.readers import open_source, read_documents  # loads pyarrow
        from apertus_model.data.documents.tables import ROWS_WITHOUT

        rows = islice(read_documents(source, *open_source(source), listing.files[0].path), ROWS_WITHOUT)
        try:
            next((row for row in rows if isinstance(row, SourceDocument)), None)
        except SourceError as error:
            message, _, fix = str(error).partition(". Fix: ")
            fields = [field for field in SourceSpec.model_fields if fix == f"correct {field}"]
            fix = f"{fix or 'correct the file, or leave it out'}."
            yield Problem(("sources", name, *fields), message, fix)
