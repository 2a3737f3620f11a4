"""`--until` and `--only`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan
from flows.planning.stage_choice import select
from specs.errors import SpecError
from specs.profiles import Profile
from tests.flows.conftest import finish

Planned = Callable[..., Plan]


def test_everything_is_chosen_by_default(planned: Planned) -> None:
    plan = planned()
    assert select(plan, None, None) == set(plan.pipeline.stages)


def test_until_chooses_a_stage_and_what_it_needs(planned: Planned) -> None:
    assert select(planned(), "main", None) == {"tokenizer", "corpus", "main"}
    everything_before = {
        "tokenizer",
        "corpus",
        "main",
        "second",
        "pretrain",
        "cooldown",
        "evaluate",
        "export",
    }
    assert select(planned(), "export", None) == everything_before  # export comes after evaluate


def test_only_needs_finished_inputs(planned: Planned) -> None:
    with pytest.raises(
        SpecError,
        match=(
            r"'evaluate' reads cooldown, corpus/notes, tokenizer, which are not finished. Fix: run --until"
            r" evaluate"
        ),
    ):
        select(planned(), None, "evaluate")
    finish(planned(), "tokenizer", "corpus/notes", "cooldown")
    assert select(planned(), None, "evaluate") == {"evaluate"}


def test_until_and_only_together_are_refused(planned: Planned) -> None:
    with pytest.raises(
        SpecError,
        match=(
            r"--until main also runs the inputs of 'main', --only export runs no other stage\. Fix: give one"
            r" of the two"
        ),
    ):
        select(planned(), "main", "export")


@pytest.mark.parametrize("option", ["until", "only"])
def test_missing_stage_suggests_the_nearest_name(planned: Planned, option: str) -> None:
    with pytest.raises(
        SpecError, match=rf"--{option}: there is no stage 'exprot'\. Fix: did you mean 'export'\?"
    ):
        select(planned(), **{"until": None, "only": None, option: "exprot"})


def test_a_run_needs_the_keys_of_its_servers(chat: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    server = "{url: 'http://host/v1', model: ours, key: SERVER_API_KEY}"
    stated = f"stages.preferences.completions={{n: 4, max_new_tokens: 16, engine: server, server: {server}}}"
    plan, here = chat(stated), Profile()
    monkeypatch.setenv("SERVER_API_KEY", " ")
    message = (
        r"stages.preferences.completions.server.key: 'preferences' asks a server whose key is in"
        r" SERVER_API_KEY, which is not set here. Fix: set this environment variable"
    )
    with pytest.raises(SpecError, match=message):
        select(plan, None, None, profile=here)
    assert "preferences" in select(plan, None, None)  # to look at it needs no key
    select(plan, "sft", None, profile=here)
    on_ray = chat(stated, "stages.preferences.launch.executor=ray")
    select(on_ray, None, None, profile=here)  # the nodes have it
    monkeypatch.setenv("SERVER_API_KEY", "a-key-of-a-server")
    select(plan, None, None, profile=here)


def test_a_run_needs_the_keys_of_judges_and_generators(
    chat: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    monkeypatch.delenv("SERVER_API_KEY", raising=False)
    (tmp_path / "c.md").write_text("1. Be kind.\n")
    server = "server: {url: 'http://host/v1', model: ours, api: chat, key: JUDGE_API_KEY}, revision: r1"
    judge = f"{{judge: {{constitution: {tmp_path}/c.md, {server}}}}}"
    sampling = "{max_new_tokens: 16, engine: server, server: {url: 'http://host/v1', model: b, api: chat,"
    plan = chat(
        f"stages.preferences.reward={judge}",
        f"stages.evaluate-sft.generation.reward={judge}",
        f"stages.preferences.generators={{other: {{completions: {sampling} key: SERVER_API_KEY}}}}}}}}",
    )
    with pytest.raises(SpecError) as error:
        select(plan, None, None, profile=Profile())
    assert {(problem.path, problem.message.split(" asks ")[0]) for problem in error.value.problems} == {
        (("stages", "preferences", "generators", "other", "completions", "server", "key"), "'preferences'"),
        (("stages", "preferences", "reward", "judge", "server", "key"), "'preferences'"),
        (("stages", "evaluate-sft", "generation", "reward", "judge", "server", "key"), "'evaluate-sft'"),
    }
