"""The tables of rehearsed ranks."""

from __future__ import annotations

from dataclasses import replace

from apertus_model.rehearsal.records import Operators, Synchronisation, Tensors
from flows.report.rehearsal_tables import by_stage, tables
from tests.flows.report.test_rehearsal_charts import GB, part, rehearsed


def test_memory_is_beside_the_plan_and_the_rest_is_of_the_rank_with_the_largest_peak() -> None:
    found = rehearsed(70 * GB)
    kept = Tensors(operator="mm", shape=(8, 4096), dtype="bfloat16", kind="activations", number=3, bytes=GB)
    found = found.model_copy(
        update={
            "memory": found.memory.model_copy(update={"largest": [kept]}),
            "synchronisations": [Synchronisation(place="a.py:7", what="tolist", calls=1)],
            "operators": [
                Operators(kind="memory", operator="add", calls=2, flops=0, bytes=2 * GB, seconds=1.0)
            ],
        }
    )
    memory, tensors, collectives, waits, operators = tables(
        replace(part(), ranks={0: rehearsed(60 * GB), 512: found})
    )
    assert [(row[0], *row[-3:]) for row in memory.rows] == [
        ("0", "60", "63", "+5.0%"),
        ("512", "70", "70", "+0.0%"),
    ]
    assert tensors.rows == [("mm", "8 × 4096", "bfloat16", "activations", "3", "1")]
    assert collectives.title == "Collectives of a step of rank 512"
    assert collectives.rows[0] == ("all-gather", "tp", "2", "1", "0", "1e-09", "0.5", "0")
    assert waits.rows == [("a.py:7", "tolist", "1")]
    assert operators.rows == [("add", "memory-bound operators", "2", "-", "2", "1", "25.0%")]
    assert "leave 75% of the peak" in operators.title
    assert all(len(row) == len(table.headings) for table in (memory, tensors, waits) for row in table.rows)


def test_stages_are_in_the_order_of_the_recipe_and_one_that_does_not_build_has_no_tables() -> None:
    parts = [part("b/1", "b"), part("a", "a"), part("b/2", "b")]
    assert {stage: [one.name for one in found] for stage, found in by_stage(parts).items()} == {
        "b": ["b/1", "b/2"],
        "a": ["a"],
    }
    assert list(by_stage(parts)) == ["b", "a"]
    assert tables(replace(part(), ranks={})) == []
