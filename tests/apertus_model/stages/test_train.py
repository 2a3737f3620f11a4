"""Training, evaluation and export as stages: from token files in a store to a verified Hugging Face
folder."""

from types import SimpleNamespace
from typing import Any

import pytest

from apertus_model.stages.train import BestCheckpoints
from infra.store import Artifact, Checkpoint, Store
from infra.store.documents import CheckpointMarker, Seconds
from specs.stages.domain_weights import WeightUpdate
from tests.apertus_model.harness import segment
from tests.apertus_model.stages.training import SPEC, Stages, weights_of


def test_a_trained_segment_is_a_checkpoint_with_its_history(trained: Artifact) -> None:
    manifest = trained.manifest
    assert manifest.step == 6
    assert trained.checkpoint_steps() == [3, 6]
    metrics = manifest.metrics
    assert (metrics["tokens"], metrics["samples"]) == (6 * 64, 24)
    assert set(metrics["validation"]) == {"steady", "striding"}
    rows = [row for row in trained.history() if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] == metrics["loss"]
    assert metrics["ms_per_step"] == pytest.approx(1000 * 64 / metrics["tokens_per_second"], rel=1e-2)
    assert [row["step"] for row in trained.history() if "validation" in row] == [4, 6]
    assert all(0 < row["masked_share"] < 0.5 for row in rows)


def test_an_interrupted_segment_resumes_to_the_same_bits_and_history(
    stages: Stages, trained: Artifact
) -> None:
    stages.train("interrupted", SPEC, stop_after=4)
    interrupted = Artifact(stages.store, "pretrain/interrupted", 6)
    assert not interrupted.complete
    assert interrupted.checkpoint_steps() == [3, 4]
    resumed = stages.train("interrupted", SPEC, attempt="second", resume_step=4)
    assert weights_of(resumed, 6) == weights_of(trained, 6)
    ours, theirs = ([(r["step"], r["loss"]) for r in a.history() if "loss" in r] for a in (resumed, trained))
    assert ours == theirs


def test_a_checkpoint_is_not_resumed_with_other_data(stages: Stages) -> None:
    stages.train("moved", SPEC, stop_after=2)
    checkpoint = Artifact(stages.store, "pretrain/moved", 6).checkpoint(2)
    assert checkpoint.facts["data"]["sources"]["steady"]["weight"] == 1
    recipe = stages._recipe()
    recipe["sources"][0]["weight"] = 3
    stages._artifact("mixture", "other", {}, {}, {"recipe.json": recipe})
    other = {"mixture": stages.ref("mixture/other")}
    with pytest.raises(
        RuntimeError, match=r"checkpoint of step 2 was trained on other data: sources\.steady\.weight: 1 -> 3"
    ):
        stages.train("moved", SPEC, attempt="second", resume_step=2, inputs=other)


def test_a_segment_that_was_at_its_end_already_only_commits(stages: Stages) -> None:
    artifact = stages.train("ended", SPEC.model_copy(update={"end_step": 3}))
    artifact.store.remove(artifact.manifest_path)
    again = stages.train("ended", SPEC.model_copy(update={"end_step": 3}), attempt="second", resume_step=3)
    assert again.manifest.metrics["tokens"] == 3 * 64


def test_two_processes_follow_one(stages: Stages, trained: Artifact) -> None:
    two = stages.train("two", SPEC, processes=2, launch={"threads": 1, "processes": 2})
    losses = [[row["loss"] for row in artifact.history() if "loss" in row] for artifact in (trained, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_the_next_segment_takes_over_everything_and_counts_on(stages: Stages, trained: Artifact) -> None:
    parent = stages.ref("pretrain/trained", 6)
    chained = SPEC.model_copy(
        update={"seed": None, "start_step": 6, "start_tokens": 384, "sample_offset": 24, "end_step": 8}
    )
    longer = stages.train("longer", SPEC.model_copy(update={"end_step": 8}))
    next_segment = stages.train("next", chained, inputs={"parent": parent})
    assert weights_of(next_segment, 8) == weights_of(longer, 8)
    assert next_segment.manifest.metrics["tokens"] == 8 * 64


def test_learned_weights_continue_after_a_stop_and_in_the_next_segment(stages: Stages) -> None:
    names = {"source_names": ["steady", "striding"], "update": WeightUpdate(mu=0.001)}
    spec = segment("domain_weights", **names, end_step=6)
    found = stages.train("whole", spec, kind="domain_weights").manifest.facts["domain_weights"]
    assert found["steps"] == 6 and len(set(found["mean"])) == 2 and sum(found["mean"]) == pytest.approx(1)
    stages.train("half", spec.model_copy(update={"end_step": 3}), kind="domain_weights")
    resumed = stages.train("half", spec, kind="domain_weights", attempt="second", resume_step=3)
    assert resumed.manifest.facts["domain_weights"] == found
    after = {"seed": None, "start_step": 3, "start_tokens": 192, "sample_offset": 12, "end_step": 6}
    parent = {"parent": stages.ref("domain_weights/half", 3)}
    following = spec.model_copy(update=after)
    chained = stages.train("next", following, kind="domain_weights", inputs=parent)
    assert chained.manifest.facts["domain_weights"] == found
    assert chained.manifest.metrics["mean_weight/steady"] == found["mean"][0]


def test_a_branch_without_optimizer_begins_with_new_moments(stages: Stages, trained: Artifact) -> None:
    parent = stages.ref("pretrain/trained", 6)
    branch = SPEC.model_copy(update={"seed": None, "end_step": 1, "carry": ["weights"]})
    state = weights_of(stages.train("branch", branch, inputs={"parent": parent}), 1)
    assert state["optimizer.state.norm.weight.step"] == [1.0]
    carried = SPEC.model_copy(update={"seed": None, "end_step": 1, "carry": ["weights", "optimizer"]})
    state = weights_of(stages.train("carried", carried, inputs={"parent": parent}), 1)
    assert state["optimizer.state.norm.weight.step"] == [7.0]


NOWHERE = Artifact(Store.open("memory://nowhere"), "sft/none")


def checkpoint(step: int, validation: dict[str, float], measured: int | None) -> Checkpoint:
    facts = {"validation": validation, "validation_step": measured}
    seconds = Seconds(startup=0.0, compute=0.0, storage=0.0)
    return Checkpoint(
        NOWHERE,
        step,
        "",
        CheckpointMarker(step=step, attempt="a", folder="f", files={}, facts=facts, seconds=seconds),
    )


def test_the_best_step_is_the_first_with_the_lowest_loss_among_those_measured_at_their_own_step() -> None:
    stored = [
        checkpoint(1, {}, None),
        checkpoint(2, {"a": 3.0, "b": 1.0}, 2),
        checkpoint(3, {"a": 0.0, "b": 0.0}, 2),
        checkpoint(4, {"a": 2.0, "b": 2.0}, 4),
        checkpoint(5, {"a": 1.0, "b": 5.0}, 5),
    ]
    by_step = {item.step: item for item in stored}
    artifact: Any = SimpleNamespace(checkpoint_steps=lambda: list(by_step), checkpoint=by_step.__getitem__)
    assert BestCheckpoints(["val_loss"]).steps(artifact) == {2}
    assert BestCheckpoints(["val_loss/a", "val_loss/b"]).steps(artifact) == {5, 2}
    assert BestCheckpoints(["val_loss/c"]).steps(artifact) == set()
    assert BestCheckpoints([]).steps(artifact) == set()
