from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.inspection.logs import follow, lines
from flows.planning.graph import Node
from flows.planning.plan import Plan
from tests.flows.conftest import finish, job_of

Planned = Callable[..., Plan]


def _ended(plan: Plan, node: Node, attempt: str, log: bytes) -> None:
    plan.store.write_bytes(f"{node.path}/logs/{attempt}.txt", log)


def _running(plan: Plan, node: Node, scratch: Path, attempt: str, log: bytes) -> Path:
    folder = scratch / f"apertus-{node.name.replace('/', '-')}-x{attempt}"
    folder.mkdir(parents=True)
    job = job_of(plan, node).model_copy(update={"attempt": attempt})
    (folder / "job.json").write_text(job.model_dump_json())
    (folder / "log.txt").write_bytes(log)
    return folder / "log.txt"


def test_the_last_attempt_is_shown_or_every_one(planned: Planned, tmp_path: Path) -> None:
    plan = planned()
    node = plan.graph.nodes["tokenizer"]
    _ended(plan, node, "20260102T000000-b", b"second\n")
    _ended(plan, node, "20260101T000000-a", b"first\nfailed \xff\n")
    assert list(lines(plan.store, [node], str(tmp_path))) == [("tokenizer", "second")]
    every = [line for _, line in lines(plan.store, [node], str(tmp_path), every=True)]
    assert every == ["first", "failed \ufffd", "second"]
    _running(plan, node, tmp_path, "20260103T000000-c", b"third\n")
    other = planned("stages.tokenizer.vocab_size=640", "stages.pretrain.model.vocab_size=640")
    changed = other.graph.nodes["tokenizer"]
    assert list(lines(plan.store, [node], str(tmp_path))) == [("tokenizer", "third")]
    assert list(lines(other.store, [changed], str(tmp_path))) == []


def test_secrets_of_the_environment_are_left_out(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")
    plan = planned()
    node = plan.graph.nodes["tokenizer"]
    _running(plan, node, tmp_path, "a", b"the key is 0123456789secret\n")
    [(_, line)] = lines(plan.store, [node], str(tmp_path))
    assert "0123456789secret" not in line and line.startswith("the key is ")


def test_followed_lines_come_once_and_whole_until_all_parts_are_finished(
    planned: Planned, tmp_path: Path
) -> None:
    plan = planned()
    nodes = tokenizer, corpus = [plan.graph.nodes[name] for name in ("tokenizer", "corpus/notes")]
    _ended(plan, tokenizer, "20260101T000000-a", b"an old failure\n")
    log = _running(plan, tokenizer, tmp_path, "20260102T000000-b", b"one\ntw")

    def ends() -> None:
        _ended(plan, tokenizer, "20260102T000000-b", b"one\ntwo\nthree, without an end of line")
        log.unlink()
        finish(plan, "tokenizer")

    def goes_on() -> None:
        _running(plan, corpus, tmp_path, "20260103T000000-c", b"documents\n")

    def is_over() -> None:
        _ended(plan, corpus, "20260103T000000-c", b"documents\ntokens\n")
        finish(plan, "corpus/notes")

    steps = iter((ends, goes_on, is_over))
    found = follow(plan.store, nodes, str(tmp_path), sleep=lambda seconds: next(steps)())
    assert list(found) == [
        ("tokenizer", "one"),
        ("tokenizer", "two"),
        ("tokenizer", "three, without an end of line"),
        ("corpus/notes", "documents"),
        ("corpus/notes", "tokens"),
    ]
