"""Advice: each code once where it is given and once where it is not; silences."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.store import Store
from specs.advice import CODES
from specs.model import FLAVOURS
from tests.flows.planning.advising import FAILING, REPEATED, Advised, plan_of

LONGER = (
    "stages.longer.steps=[{{sequence_length: 64, rope_theta: {theta}, global_batch_size: 4, budget: 4 steps,"
    " mixture: main, schedule: {{warmup: 2 steps}}}}]"
)
WHOLE = tuple(f"stages.pretrain.model.{name}={value}" for name, value in FLAVOURS["8b"].items())
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    # code: overrides with which it is given, with which it is not, a stage that it is given for
    "sft-optimizer": (("stages.sft.optimizer={name: adamw, lr: 1e-3}",), (), "sft"),
    "decay-before-sft": (("stages.cooldown.schedule={decay: linear, final: 0.1}",),
    ("stages.cooldown.schedule={decay: none}",), "sft"),
    "learning-rate-jump": (("stages.cooldown.optimizer.lr=4e-2",), ("stages.cooldown.optimizer.lr=1e-2",),
    "cooldown"),
    "slow-warmup": (("stages.pretrain.optimizer.alpha_warmup=100",), (), "cooldown"),
    "never-reached": (("stages.pretrain.checkpoint.milestones=[16, 17]",),
    ("stages.pretrain.checkpoint.milestones=[16]",), "pretrain"),
    "repetition": (REPEATED, (), "pretrain"),
    "goldfish-off": ((*REPEATED, "stages.pretrain.goldfish=null"), REPEATED, "pretrain"),
    "rope-theta": ((LONGER.format(theta="5e5"),), (LONGER.format(theta="6e5"),), "longer"),
    "tokens-per-batch": (
        ("stages.cooldown.sequence_length=64",),
        ("stages.cooldown.sequence_length=64", "stages.cooldown.global_batch_size=4"),
        "cooldown",
    ),
    "not-deterministic": (("stages.cooldown.deterministic=false",), (), "cooldown"),
    "checkpoint-interval": (
        (*FAILING, "stages.pretrain.checkpoint.interval=1"),
        (*FAILING, "stages.pretrain.checkpoint.interval=6"), "pretrain",
    ),
    "gpu-memory": (("cluster={gpu: H100}", *WHOLE), ("cluster={gpu: H100}",), "pretrain"),
    "slow-inference": (
        ("cluster={gpu: H100, mfu: 0.5}", "stages.evaluate.samples=100_000_000_000"),
        ("cluster={gpu: H100, mfu: 0.5}", "stages.evaluate.samples=10_000_000"), "evaluate",
    ),
    "slow-corpus": (
        ("sources.notes.url=absent", "sources.notes.declared={tokens: 1T tokens}",
         "stages.corpus.launch={workers: {count: 2}}"),
        ("sources.notes.url=absent", "sources.notes.declared={tokens: 1T tokens}",
         "stages.corpus.launch={workers: {count: 6}}"),
        "corpus",
    ),
    "cluster-size": (
        ("cluster={gpu: H100, gpus_per_node: 4, nodes: 1}",
        "stages.pretrain.launch={processes: 8, parallel: {dp_replicate: 2, tp: 1}}",
         "stages.pretrain.global_batch_size=8"),
        ("cluster={gpu: H100, gpus_per_node: 4, nodes: 2}",
        "stages.pretrain.launch={processes: 8, parallel: {dp_replicate: 2, tp: 1}}",
         "stages.pretrain.global_batch_size=8"),
        "pretrain",
    ),
}  # fmt: skip


def test_every_code_has_a_case() -> None:
    assert set(CASES) == set(CODES)


@pytest.mark.parametrize("code", CASES)
def test_advice_is_given_only_where_it_applies(advised: Advised, code: str) -> None:
    given, absent, stage = CASES[code]
    found = [advice for advice in advised(*given).get(code, []) if advice["stage"] == stage]
    assert found and all(advice["numbers"] for advice in found)
    assert found[0]["reason"] == CODES[code].reason
    assert [advice for advice in advised(*absent).get(code, []) if advice["stage"] == stage] == []


def test_a_silenced_code_is_not_given_and_one_that_has_no_effect_is_noted(
    tmp_path: Path, store: Store
) -> None:
    jump = "stages.cooldown.optimizer.lr=4e-2"
    silent = plan_of(tmp_path, store, jump, "stages.cooldown.silence=[learning-rate-jump, rope-theta]")
    assert "learning-rate-jump" not in {advice.code for advice in silent.advice.given}
    assert [advice.stage for advice in silent.advice.silenced] == ["cooldown"]
    assert (
        "cooldown: silence: [rope-theta] has no effect, there is nothing to silence"
        in silent.to_json()["notes"]
    )
    everywhere = plan_of(tmp_path, store, jump, "silence=[learning-rate-jump, repetition]")
    assert [advice["code"] for advice in everywhere.to_json()["silenced"]] == ["learning-rate-jump"]
    assert "silence: [repetition] has no effect, there is nothing to silence" in everywhere.to_json()["notes"]


def test_silence_changes_no_fingerprint(tmp_path: Path, store: Store) -> None:
    plans = [
        plan_of(tmp_path, store, *overrides)
        for overrides in ((), ("stages.pretrain.silence=[repetition]", "cluster={gpu: A100}"))
    ]
    before, after = ([node.fingerprint for node in plan.graph.nodes.values()] for plan in plans)
    assert before == after
