"""A judge's answers across parts: what one asked, no other asks again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apertus_model.data.rows import Row, Rows
from apertus_model.rewards import stored_answers
from apertus_model.rewards.judge_model import TransformersJudge
from apertus_model.rewards.stored_answers import StoredAnswers
from infra.store import Artifact
from tests.apertus_model.other_models import other_folder
from tests.apertus_model.preference_artifacts import attempt_at, put_rows

CONSTITUTION = "1. Answer the question.\n2. Be brief.\n"


@pytest.fixture
def judge(bench: Any, tmp_path: Path) -> Artifact:
    folder = other_folder(tmp_path / "judge", "Qwen3ForCausalLM")
    attempt = attempt_at(bench, "model_folder", "judge0")
    for path in sorted(folder.iterdir()):
        attempt.put(path, path.name)
    attempt.commit(metrics={})
    return attempt.artifact


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that the model answers."""
    asked: list[str] = []
    ask = TransformersJudge.ask

    def counting(self: TransformersJudge, questions: Any, answers: Any) -> Any:
        asked.extend(questions)
        return ask(self, questions, answers)

    monkeypatch.setattr(TransformersJudge, "ask", counting)
    return asked


def run(bench: Any, name: str, stated: dict[str, Any], read: dict[str, Artifact]) -> Artifact:
    artifact: Artifact = bench.run("rewards", name, stated, read, launch={"threads": 1})
    return artifact


def spec(tmp_path: Path, **more: Any) -> dict[str, Any]:
    (tmp_path / "constitution.txt").write_text(CONSTITUTION)
    stated = {"from": "hf:theirs", "constitution": str(tmp_path / "constitution.txt"), **more}
    return {"reward": {"judge": stated, "max_tokens": 1000}, "prompts_per_unit": 1}


def inputs(bench: Any, name: str, judge: Artifact, *answers: str) -> dict[str, Artifact]:
    prompts = [
        {"id": f"p{index}", "messages": [{"role": "user", "content": f"question {index}"}], "text": "q",
         "answer": "four", "metadata": {}, "completions": [{"text": "four", "tokens": [7]}]}
        for index in range(2)
    ]  # fmt: skip
    sampled = [{"text": text, "tokens": [8], "finished": True} for text in answers]
    completions = [{"id": row["id"], "completions": sampled} for row in prompts]
    return {
        "prompts": put_rows(bench, "prompts", f"p{name}", prompts),
        "completions": put_rows(bench, "completions", f"c{name}", completions),
        "judge": judge,
    }


def test_only_new_completions_are_asked_about(
    bench: Any, judge: Artifact, tmp_path: Path, counted: list[str]
) -> None:
    first = run(bench, "one", spec(tmp_path), inputs(bench, "one", judge, "red", "green"))
    assert len(counted) == 2 * 3
    second = run(bench, "two", spec(tmp_path), inputs(bench, "two", judge, "green", "blue"))
    assert len(counted) == 2 * 3 + 2
    for before, after in zip(Rows(first), Rows(second), strict=True):
        assert after["offline"] == before["offline"]
        assert after["sampled"][0] == before["sampled"][1]
        assert [one["about"] for one in after["answers"]] == [[0], [1], [2]]


def test_a_comparison_is_added_without_asking_for_the_scores_again(
    bench: Any, judge: Artifact, tmp_path: Path, counted: list[str]
) -> None:
    read = inputs(bench, "one", judge, "red", "green")
    run(bench, "one", spec(tmp_path), read)
    counted.clear()
    run(bench, "two", spec(tmp_path, pairwise={"best": 2}), read)
    assert len(counted) == 2 * 2
    assert all("Answer A:" in question for question in counted)


def test_finished_units_of_an_unfinished_part_count(
    bench: Any, judge: Artifact, tmp_path: Path, counted: list[str]
) -> None:
    read = inputs(bench, "one", judge, "red")
    artifact = run(bench, "one", spec(tmp_path), read)
    artifact.store.remove(artifact.manifest_path)
    counted.clear()
    run(bench, "two", spec(tmp_path, scale=[1, 9]) | {"prompts_per_unit": 2}, read)
    assert counted == []


@pytest.mark.parametrize("change", ["constitution", "judge", "scale"])
def test_another_judge_answers_itself(
    bench: Any, judge: Artifact, tmp_path: Path, counted: list[str], change: str
) -> None:
    read = inputs(bench, "one", judge, "red")
    run(bench, "one", spec(tmp_path), read)
    counted.clear()
    stated = spec(tmp_path, **({"scale": [1, 5]} if change == "scale" else {}))
    if change == "constitution":
        (tmp_path / "constitution.txt").write_text(CONSTITUTION.replace("brief", "long"))
    if change == "judge":
        attempt = attempt_at(bench, "model_folder", "judge1")
        for name in judge.manifest.files:
            attempt.put(judge.local(name), name)
        attempt.commit(metrics={})
        read["judge"] = attempt.artifact
    run(bench, "two", stated, read)
    assert len(counted) == 2 * 2


def test_what_is_damaged_is_not_known(
    bench: Any, judge: Artifact, tmp_path: Path, counted: list[str]
) -> None:
    read = inputs(bench, "one", judge, "red")
    artifact = run(bench, "one", spec(tmp_path), read)
    key = Rows(artifact)[0]["answers"][0]["key"]
    (tmp_path / "before").mkdir()
    found = StoredAnswers(bench.store, tmp_path / "before", judge.manifest.fingerprint).get(key)
    assert list(found or ()) == Rows(artifact)[0]["answers"][0]["probabilities"]
    path = Path(bench.store.full(artifact.stored_name("rewards-00000.jsonl")))
    path.write_text(path.read_text().replace(key, "0" * 32))
    (tmp_path / "after").mkdir()
    known = StoredAnswers(bench.store, tmp_path / "after", judge.manifest.fingerprint)
    assert known.get(key) is None
    assert known.get("0" * 32) is None


def test_only_parts_that_asked_the_same_model_are_read(
    bench: Any, judge: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = run(bench, "one", spec(tmp_path), inputs(bench, "one", judge, "red"))
    key = Rows(artifact)[0]["answers"][0]["key"]
    opened: list[str] = []
    rows = stored_answers._rows

    def counting(part: Artifact) -> Iterator[Row]:
        opened.append(part.path)
        return rows(part)

    monkeypatch.setattr(stored_answers, "_rows", counting)
    for number, (model, known) in enumerate(
        [(judge.manifest.fingerprint, True), ("another", False), (None, False)]
    ):
        (tmp_path / str(number)).mkdir()
        found = StoredAnswers(bench.store, tmp_path / str(number), model).get(key)
        assert (found is not None, len(opened)) == (known, 1)


def test_the_part_stores_the_constitution_and_the_mass_outside_the_scale(
    bench: Any, judge: Artifact, tmp_path: Path
) -> None:
    artifact = run(bench, "one", spec(tmp_path), inputs(bench, "one", judge, "red", ""))
    assert artifact.bytes("constitution.txt").decode() == CONSTITUTION
    rows = [json.loads(line) for line in artifact.bytes("rewards-00000.jsonl").splitlines()]
    outside = [1 - sum(one["probabilities"]) for row in rows for one in row["answers"]]
    assert len(outside) == 4  # the empty completions are not asked about
    assert artifact.manifest.metrics["outside"] == pytest.approx(sum(outside) / 4)
    assert artifact.manifest.metrics["outside_max"] == pytest.approx(max(outside))
    assert [row["sampled"][1] for row in rows] == [1.0, 1.0]
