"""Parts whose units ask a model, small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.store import Artifact
from tests.apertus_model.attempts import stored_bytes
from tests.apertus_model.evaluation.task_data import (
    ARC,
    GSM8K,
    WIKITEXT,
    write_arc,
    write_gsm8k,
    write_wikitext,
)
from tests.apertus_model.preference_artifacts import attempt_at, put_model, put_rows


def asking(
    bench: Any, folder: Path, tokenizer: Artifact, kind: str
) -> tuple[dict[str, Any], dict[str, Artifact]]:
    """A part that asks a model in three units, and its inputs."""
    model = put_model(bench, tokenizer)
    if kind == "harness":
        for write in (write_arc, write_gsm8k, write_wikitext):
            write(folder / "data")
        suite = {"tasks": ["arc_easy", "gsm8k", "wikitext"], "generation": {"max_gen_toks": 8}}
        read = {"model": model} | {f"data:{name}": model for name in (ARC, GSM8K, WIKITEXT)}
        return {"suite": suite, "datasets": str(folder / "data")}, read
    sampling = {"n": 1, "max_new_tokens": 5, "batch_size": 2}
    if kind == "completions":
        rows = [{"id": str(number), "tokens": [1, 60 + number, 67]} for number in range(6)]
        prompts = put_rows(bench, "prompts", "p", rows, {"end_of_turn_id": 68, "pad_id": 10})
        return {"sampling": sampling, "prompts_per_unit": 2}, {"model": model, "prompts": prompts}
    attempt = attempt_at(bench, "corpus", "probed")
    probes = [{"bucket": 0, "token_ids": [20 + number] * 12} for number in range(6)]
    attempt.write_json("probes.json", {"length": 12, "probes": probes})
    attempt.commit(metrics={}, facts={})
    stated = {"prefixes": [4], "offsets": [0], "batches_per_unit": 1, "sampling": sampling}
    return stated, {"model": model, "probes": attempt.artifact}


def workers_answer_as_a_local_run(
    bench: Any,
    folder: Path,
    tokenizer: Artifact,
    kind: str,
    launch: dict[str, Any],
    profile: dict[str, Any],
) -> None:
    """Compares the bytes of part `workers`, which `launch` sends to a cluster, with those of part `here`."""
    if kind == "harness":
        pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    spec, inputs = asking(bench, folder, tokenizer, kind)
    here = bench.run(kind, "here", spec, inputs)
    launch = launch | {"workers": {"units_per_job": 2}}
    stored = stored_bytes(bench.run(kind, "workers", spec, inputs, launch=launch, profile=profile))
    assert stored == stored_bytes(here) and stored
