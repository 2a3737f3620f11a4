from __future__ import annotations

from flows.inspection.corpus import find_documents
from flows.planning.plan import Plan
from tests.flows.inspection.looking import look


def test_what_became_of_a_document_is_printed(built: Plan) -> None:
    absent, printed = look(built, "corpus/notes", document="nowhere")
    assert absent["documents"] == []
    assert "corpus/notes has read no document with the id, URL or hash 'nowhere'" in printed
    corpus = built.graph.nodes["corpus/notes"].artifact(built.store)
    number = next(row["hash"] for row in look(built, "corpus/notes", reason="kept")[0]["examples"])
    found, printed = look(built, "corpus/notes", document=number)
    (row,) = found["documents"]
    assert [row] == find_documents(corpus, number)
    assert number in printed and f"of {row['file']}" in printed and row["became"] in printed
