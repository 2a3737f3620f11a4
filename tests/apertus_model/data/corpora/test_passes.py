"""A corpus whose stage dies again and again, in every pass, has the bits of one that was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apertus_model.data.corpora.plan import FILES
from infra.store import Artifact
from tests.apertus_model.attempts import Interrupted, StopsAfterOneUnit, stored_bytes
from tests.apertus_model.corpora import corpus_spec

FILTERS = [{"filter": "near-duplicates", "ngram": 3, "buckets": 2, "hashes_per_bucket": 2}]


class DiesSoon(StopsAfterOneUnit):
    LAST = 1


def test_a_stage_that_is_killed_in_every_pass_ends_with_the_same_bits(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    inputs = {"tokenizer": tokenizer}
    repeats = {"buckets": [0, 2], "per_bucket": 1, "length": 12}
    spec = corpus_spec(documents, files_per_task=20, repeats=repeats, holdout=0.4)
    spec["process"]["filters"] = [*FILTERS, {"filter": "length", "min_characters": 200}]
    whole = bench.run("corpus", "whole", spec, inputs)
    passes: set[str] = set()
    for attempt in range(200):
        try:
            spec |= {"memory": "8KiB"}
            killed = bench.run(
                "corpus", "killed", spec, inputs, attempt=f"a{attempt}", attempt_class=DiesSoon
            )
            break
        except Interrupted:
            names = bench.store.names("corpus/killed/units")
            passes |= {name.split("-")[0].removesuffix(".json") for name in names}
    assert stored_bytes(killed) == stored_bytes(whole)
    assert killed.manifest.metrics == whole.manifest.metrics
    every = {"documents", "records", "groups", "resolve", "openings", "probes", "scatter"}
    assert passes >= every | set(FILES)
