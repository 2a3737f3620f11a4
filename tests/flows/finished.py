"""The tiny recipe as it has run, with files, metrics, a history, and what a manifest records of the source;
and the command line over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from flows.cli.__main__ import app
from flows.planning.plan import Plan
from infra.store import Attempt
from infra.store.inputs import lock
from tests.flows.conftest import finish, job_of
from tests.infra.sealed import sealed

SIZES = {"config.json": b"{}", "model.safetensors": b"weights"}


def run_tiny(planned: Callable[..., Plan]) -> Plan:
    """The plan of the recipe after its run."""
    plan = planned("sources.notes.license=CC0-1.0", "sources.notes.language=en")
    finish(
        plan,
        *(name for name in plan.graph.nodes if name not in ("corpus/notes", "main", "pretrain/1", "export")),
    )
    for name, work in (
        ("corpus/notes", corpus),
        ("main", mixture),
        ("pretrain/1", trained),
        ("export", exported),
    ):
        attempt = Attempt(
            job_of(plan, plan.graph.nodes[name]).model_copy(update={"spec": spec_of(plan, name)}), plan.store
        )
        attempt.begin()
        work(plan, attempt)
    for listing_name, listing in plan.graph.listings.items():
        lock(plan.store, listing, plan.graph.digests[listing_name])
    return planned("sources.notes.license=CC0-1.0", "sources.notes.language=en")


def spec_of(plan: Plan, name: str) -> dict[str, Any]:
    return plan.graph.nodes[name].part.model_dump(mode="json", by_alias=True)


def corpus(plan: Plan, attempt: Attempt) -> None:
    counts = {"train": {"documents": 20, "tokens": 40_000}, "validation": {"documents": 4, "tokens": 900}}
    dropped = {"filters": ["length", "alphabetic"], "dropped": {"alphabetic": 1, "length": 5}}
    attempt.commit(metrics={"read": {"documents": 30}, "documents": 24, "tokens": 40_900} | dropped | counts)


def mixture(plan: Plan, attempt: Attempt) -> None:
    corpus = plan.graph.nodes["corpus/notes"]
    source = {"fingerprint": corpus.fingerprint, "path": corpus.path, "weight": 1, "tokens": 40_000}
    ids = {"tokenizer": "t", "vocab_size": 512, "bos_id": 1, "eos_id": 2}
    attempt.write_json("recipe.json", {"seed": 0, "sources": [source | {"documents": 20}], **ids})
    attempt.commit(metrics={})


def trained(plan: Plan, attempt: Attempt, scale: float = 1.0) -> None:
    for step in range(1, 9):
        attempt.add_metrics({"step": step, "tokens": step * 128, "loss": scale / step})
    attempt.add_metrics({"step": 8, "validation": {"corpus/notes": scale}})
    attempt.store.write_once(f"{attempt.folder(Attempt.checkpoint_folder(8))}/weights", b"weights")
    attempt.commit_checkpoint(8, {"tokens": 1024}, files=sealed(attempt, 8))
    attempt.commit(metrics={"loss": scale / 8}, step=8)


def exported(plan: Plan, attempt: Attempt) -> None:
    for name, content in SIZES.items():
        attempt.write_bytes(name, content)
    attempt.commit(metrics={"logit_difference": 1e-6})


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def read_json(*arguments: str) -> Any:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
