"""Fine-tuning, preference training, reference log-probabilities and merging as stages. The data classes
are stood in for by small ones."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.stages import merge
from apertus_model.stages.train import starting_point
from apertus_model.trainer.checkpoint import load_tensors
from infra.store import Artifact, Attempt, DamagedError
from specs.settings import Lora
from specs.stages.merge import MergePart
from tests.apertus_model.harness import segment
from tests.apertus_model.stages.training import PAD, SPEC, Stages, weights_of
from tests.apertus_model.stages.tuning import (
    ROWS,
    StoredPairs,
    run_reference,
    sft,
    sft_inputs,
    small_data_classes,
    stored_values,
)
from tests.infra.faults import flip_what_is_written
from tests.machine import slow


@pytest.fixture(scope="module", autouse=True)
def data_classes() -> Iterator[None]:
    with small_data_classes():
        yield


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """A store with a pretrained model of six steps, two sources of conversations, and pairs."""
    stages = Stages(tmp_path_factory.mktemp("stages"), classes=small_data_classes)
    stages.train("trained", SPEC)
    for name in ("chat", "identity"):
        stages._artifact("conversations", name, {}, {"pad_id": PAD}, {})
    stages._artifact("pairs", "pairs", {}, {"pad_id": PAD}, {})
    return stages


@pytest.fixture(scope="module")
def tuned(stages: Stages) -> Artifact:
    spec = sft(checkpoint={"interval": 1, "keep": 1, "best": ["val_loss", "val_loss/identity"]})
    return stages.run("sft", "tuned", spec, inputs=sft_inputs(stages))


# Fine-tuning


def test_fine_tuning_starts_from_its_parent_and_counts_passes_of_each_source(
    stages: Stages, tuned: Artifact
) -> None:
    facts = tuned.checkpoint(6).facts
    before = Artifact(stages.store, "pretrain/trained").checkpoint(6).facts["passes"]
    assert facts["passes"] == {**before, "chat": 6.0, "identity": 18.0}
    assert facts["epochs"] == {"chat": 6.0, "identity": 18.0}
    assert set(before) == {"steady", "striding"}
    rows = [row for row in tuned.history() if "loss" in row]
    new = next(
        row["loss"] for row in Artifact(stages.store, "pretrain/trained", 6).history() if "loss" in row
    )
    assert rows[0]["loss"] != new


def test_held_out_losses_are_stored_with_the_step_that_they_belong_to(tuned: Artifact) -> None:
    measured = {row["step"]: row["validation"] for row in tuned.history() if "validation" in row}
    assert list(measured) == [2, 4, 6]
    assert set(measured[6]) == {"chat", "identity"}
    last = tuned.checkpoint(6)
    assert last.facts["validation_step"] == 6
    assert last.validation_loss("val_loss/chat") == measured[6]["chat"]
    assert last.validation_loss("val_los") is None
    assert last.validation_loss("val_loss") == pytest.approx(sum(measured[6].values()) / 2)


def test_the_best_checkpoints_so_far_are_kept_beside_the_last(tuned: Artifact) -> None:
    measured = {row["step"]: row["validation"] for row in tuned.history() if "validation" in row}
    best = {
        min(measured, key=lambda step: sum(measured[step].values())),
        min(measured, key=lambda step: measured[step]["identity"]),
    }
    assert set(tuned.checkpoint_steps()) == {*best, 6}


@pytest.mark.parametrize("processes", [slow(1), 2])
def test_interrupted_fine_tuning_with_adapters_resumes_to_the_same_bits(
    stages: Stages, processes: int
) -> None:
    spec = sft(lora=Lora(rank=2, alpha=4.0, targets=["wq", "down_proj"]), prompt_weight=0.25)
    names = [f"lora-{processes}", f"lora-{processes}-interrupted"]
    fields: dict[str, Any] = {"inputs": sft_inputs(stages), "processes": processes}
    whole = stages.run("sft", names[0], spec, **fields)
    stages.run("sft", names[1], spec, stop_after=4, **fields)
    resumed = stages.run("sft", names[1], spec, attempt="second", resume_step=4, **fields)
    assert weights_of(resumed, 6) == weights_of(whole, 6)
    assert resumed.checkpoint(6).facts["validation"] == whole.checkpoint(6).facts["validation"]


def test_a_segment_takes_over_adapters_of_its_phase_and_a_new_phase_merges_them(stages: Stages) -> None:
    inputs = {"parent": stages.ref("pretrain/trained", 6)}
    for kind, itself, begins in (
        ("sft", sft(start_step=6, end_step=8), False),
        ("long_context", segment(carry=["weights", "data"]), True),
    ):
        job = stages.job(kind, "x", inputs=inputs)
        source = starting_point(itself, Attempt(job))
        assert source is not None
        assert (source.optimizer, source.new_adapters) == (not begins, begins)


# Preference data and training


@pytest.fixture(scope="module")
def reference(stages: Stages, tuned: Artifact) -> Artifact:
    return run_reference(stages, "reference")


def test_log_probabilities_are_stored_by_sequence_id(
    stages: Stages, tuned: Artifact, reference: Artifact
) -> None:
    pairs = StoredPairs(tuned, None)
    from apertus_model.model.model import model_config

    model = model_config(SPEC.model, sequence_length=16, attention="sdpa").build()
    state = dict(model.state_dict())
    load_tensors(state, tuned.checkpoint(6))
    model.load_state_dict(state)
    values, tokens = stored_values(reference), 0
    assert (values.dtype, values.shape) == (np.dtype(np.float32), (pairs.sequences,))
    for row in range(ROWS):
        sample = pairs.row(row)
        with torch.no_grad():
            log_p = (
                model(torch.from_numpy(sample.input)[None], torch.from_numpy(sample.positions)[None])[0]
                .double()
                .log_softmax(-1)
            )
        for index, sequence in enumerate(pairs.sequence_ids(row)):
            places = np.flatnonzero(sample.segments == index)
            tokens += len(places)
            assert values[sequence] == pytest.approx(
                sum(log_p[i, sample.labels[i]].item() for i in places), rel=1e-5
            )
    metrics = reference.manifest.metrics
    assert (metrics["sequences"], metrics["tokens"]) == (pairs.sequences, tokens)
    assert metrics["log_probability_per_token"] == pytest.approx(values.sum() / tokens, rel=1e-6)


def test_neither_units_nor_processes_change_the_log_probabilities(
    stages: Stages, reference: Artifact
) -> None:
    units = run_reference(stages, "units", sequences_per_unit=2)
    assert np.array_equal(stored_values(units), stored_values(reference))
    two = run_reference(stages, "two", processes=2)
    np.testing.assert_allclose(stored_values(two), stored_values(reference), rtol=1e-6)


def test_what_an_attempt_has_committed_is_not_computed_again(stages: Stages, reference: Artifact) -> None:
    name, made = "restarted", {"values": [-1.0] * 8, "tokens": 8}
    job = stages.job("log_probabilities", name, attempt="killed")
    Attempt(job).commit_unit("rows-00000000-00000003", data=made)
    values = stored_values(run_reference(stages, name))
    pairs = StoredPairs(reference, None)
    first = np.concatenate([pairs.sequence_ids(row) for row in range(3)])
    assert len(first) == 8
    assert set(values[first]) == {-1.0}
    others = np.setdiff1d(np.arange(pairs.sequences), first)
    assert np.array_equal(values[others], stored_values(reference)[others])


@pytest.mark.parametrize("kind", ["qrpo", "dpo"])
def test_preference_training_begins_at_its_reference(
    stages: Stages, tuned: Artifact, reference: Artifact, kind: str
) -> None:
    inputs = {
        "pairs": stages.ref("pairs/pairs"),
        "log_probabilities": stages.ref(reference.path),
        "parent": stages.ref("sft/tuned", 6),
    }
    trained = stages.run(kind, kind, segment(kind, seed=None, micro_batch_size=2), inputs=inputs)
    rows = [row for row in trained.history() if "loss" in row]
    assert (rows[0]["log_ratio_chosen"], rows[0]["log_ratio_rejected"]) == (0.0, 0.0)
    assert rows[-1]["log_ratio"] != 0.0
    facts = trained.checkpoint(6).facts
    assert facts["passes"]["pairs"] == 24 / ROWS
    assert facts["passes"]["identity"] == 18.0
    assert trained.manifest.metrics["accuracy"] == rows[-1]["accuracy"]


# Merging


def merged(
    stages: Stages, name: str, weights: list[float], *, processes: int = 1, parents: Any = None, **rule: Any
) -> Artifact:
    parents = parents or [("pretrain/trained", 3), ("pretrain/trained", 6), ("sft/tuned", 6)]
    inputs = {f"checkpoint:{index}": stages.ref(*parent) for index, parent in enumerate(parents)}
    if base := rule.pop("base", None):
        inputs["base"] = stages.ref(*base)
    part = MergePart(model=SPEC.model, weights=weights, **rule)
    stages.run("merge", name, part, inputs=inputs, processes=processes)
    return Artifact(stages.store, f"merge/{name}", merge.RESULT)


@pytest.fixture(scope="module")
def average(stages: Stages, tuned: Artifact) -> Artifact:
    return merged(stages, "average", [1.0, 2.0, 0.5])


def test_the_average_is_weighted_in_float64_and_rounded_once(
    stages: Stages, tuned: Artifact, average: Artifact
) -> None:
    found = weights_of(average, 1)
    assert found.pop("progress.step") == [1]
    trained = Artifact(stages.store, "pretrain/trained")
    parents = [weights_of(artifact, step) for artifact, step in ((trained, 3), (trained, 6), (tuned, 6))]
    assert found.keys() == {name for name in parents[0] if not name.startswith(("optimizer.", "progress."))}
    for name, values in found.items():
        exact = sum(
            np.array(parent[name], np.float64) * (weight / 3.5)
            for parent, weight in zip(parents, (1.0, 2.0, 0.5), strict=True)
        )
        assert values == exact.astype(np.float32).tolist(), name


def test_the_average_has_the_same_bits_on_two_processes(stages: Stages, average: Artifact) -> None:
    assert weights_of(merged(stages, "two", [1.0, 2.0, 0.5], processes=2), 1) == weights_of(average, 1)


def test_an_average_knows_what_its_checkpoints_have_seen(
    stages: Stages, tuned: Artifact, average: Artifact
) -> None:
    facts = average.checkpoint(1).facts
    assert facts["passes"] == tuned.checkpoint(6).facts["passes"]
    assert facts["tokens"] == 6 * 64
    assert average.manifest.metrics["checkpoints"] == 3


def test_an_average_of_adapted_models_is_that_of_their_merged_weights(stages: Stages) -> None:
    lora = Lora(rank=2, alpha=4.0, targets=["wq", "down_proj"])
    names = ["first", "second"]
    for name, seed in zip(names, (1, 2), strict=True):
        stages.run("sft", name, sft(lora=lora, data_seed=seed, end_step=2), inputs=sft_inputs(stages))
    found = [
        weights_of(
            merged(
                stages, f"adapted-{n}", [1, 1], processes=n, parents=[(f"sft/{name}", 2) for name in names]
            ),
            1,
        )
        for n in (1, 2)
    ]
    assert found[0] == found[1]
    name = "layers.1.attention.qkv_linear.wq.weight"
    whole = []
    for parent in names:
        state = {name: torch.empty(32, 32)}
        load_tensors(state, Artifact(stages.store, f"sft/{parent}").checkpoint(2))
        whole.append(state[name].double().numpy())
    assert found[0][name] == ((whole[0] + whole[1]) / 2).astype(np.float32).flatten().tolist()
    assert not any("lora" in stored for stored in found[0])


BASE, TUNED = ("pretrain/trained", 3), [("pretrain/trained", 6), ("sft/tuned", 6)]


def parameters(stages: Stages, *parents: tuple[str, int]) -> list[dict[str, np.ndarray]]:
    return [
        {
            name: np.array(value, np.float32)
            for name, value in weights_of(Artifact(stages.store, path), step).items()
            if not name.startswith(("optimizer.", "progress."))
        }
        for path, step in parents
    ]


def ties_by_loops(base: Any, tuned: list[Any], weights: list[float], density: float, scale: float) -> Any:
    """Element by element, as in arXiv 2306.01708: trim, elect a sign, merge those that agree."""
    deltas = [(one - base).astype(np.float64) for one in tuned]
    for delta in deltas:
        kept = max(1, int(density * delta.size))
        least = sorted(np.abs(delta), reverse=True)[kept - 1]
        delta[np.abs(delta) < least] = 0
    result = base.astype(np.float64)
    for index in range(len(base)):
        values = [delta[index] for delta in deltas]
        sign = 1 if sum(w * v for w, v in zip(weights, values, strict=True)) >= 0 else -1
        agree = [(w, v) for w, v in zip(weights, values, strict=True) if np.sign(v) == sign]
        if agree:
            result[index] += scale * sum(w * v for w, v in agree) / sum(w for w, _ in agree)
    return result


def test_task_arithmetic_adds_and_subtracts_differences(stages: Stages, tuned: Artifact) -> None:
    rule = {"method": "task-arithmetic", "base": BASE, "scale": 0.5}
    found = weights_of(merged(stages, "arithmetic", [1.0, -2.0], parents=TUNED, **rule), 1)
    base, first, second = parameters(stages, BASE, *TUNED)
    assert set(base) == set(found) - {"progress.step"}
    for name, start in base.items():
        exact = start + 0.5 * ((first[name] - start).astype(np.float64) - 2.0 * (second[name] - start))
        assert found[name] == pytest.approx(exact.tolist(), rel=2e-7, abs=1e-12), name


@pytest.mark.parametrize("density", [0.2, slow(1.0)])
def test_ties_equals_loops_over_the_elements_on_any_number_of_processes(
    stages: Stages, tuned: Artifact, density: float
) -> None:
    rule = {"method": "ties", "base": BASE, "scale": 0.7, "density": density}
    weights = [1.0, 2.0]
    found, two = (
        weights_of(merged(stages, f"ties-{density}-{n}", weights, parents=TUNED, processes=n, **rule), 1)
        for n in (1, 2)
    )
    assert found == two
    base, *others = parameters(stages, BASE, *TUNED)
    changed = 0
    for name, start in base.items():
        exact = ties_by_loops(start, [one[name] for one in others], weights, density, 0.7)
        assert found[name] == pytest.approx(exact.tolist(), rel=2e-7, abs=1e-12), name
        changed += int((np.array(found[name], np.float32) != start).sum())
    assert changed > 0


@pytest.mark.parametrize("method", ["task-arithmetic", "ties"])
def test_merges_are_those_of_mergekit(stages: Stages, tuned: Artifact, method: str) -> None:
    registry = pytest.importorskip(
        "mergekit.merge_methods.registry", reason="pip install --no-deps mergekit==0.1.5 adds the peer"
    )
    theirs = {one.spec.name: one for one in registry.registered_methods()}[method.replace("-", "_")]
    rule = {"method": method, "base": BASE, "scale": 0.7, **({"density": 0.3} if method == "ties" else {})}
    weights = {"first": 1.0, "second": 2.0}
    found = weights_of(merged(stages, f"peer-{method}", list(weights.values()), parents=TUNED, **rule), 1)
    defaults = {one.name: one.default for one in theirs.spec.parameters}
    parameters_of_theirs = {
        **defaults, "lambda": 0.7, "weight": weights, "density": dict.fromkeys(weights, 0.3)
    }  # fmt: skip
    base, *others = (
        {name: torch.from_numpy(value).double() for name, value in one.items()}
        for one in parameters(stages, BASE, *TUNED)
    )
    for name, start in base.items():
        entries = [
            SimpleNamespace(id=key, tensor=one[name]) for key, one in zip(weights, others, strict=True)
        ]
        group = SimpleNamespace(base=SimpleNamespace(tensor=start), non_base=entries)
        expected = theirs.merge_group(group, **parameters_of_theirs)
        largest = max(float((entry.tensor - start).abs().max()) for entry in entries)
        rounded = 2**-24 * largest * 0.7 * 3  # a difference to float32, times scale and weights
        assert found[name] == pytest.approx(expected.tolist(), rel=2e-7, abs=rounded), name


def test_a_merge_is_a_parent_like_any_other(stages: Stages, average: Artifact) -> None:
    child = stages.run("sft", "child", sft(end_step=2), inputs=sft_inputs(stages, "merge/average", 1))
    passes = average.checkpoint(1).facts["passes"]
    assert child.checkpoint(2).facts["passes"] == {
        **passes,
        "chat": passes["chat"] + 2,
        "identity": passes["identity"] + 6,
    }
    values = stored_values(run_reference(stages, "of-merge", checkpoint="merge/average", step=1))
    assert np.isfinite(values).all() and (values < 0).all()


def test_a_bit_that_the_disk_changes_is_not_sealed_into_an_average(
    stages: Stages, average: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_what_is_written(monkeypatch)
    flipped = merged(stages, "flipped", [1.0, 2.0, 0.5])
    with pytest.raises(DamagedError, match="differs from the digest"):
        flipped.checkpoint(1).check()


def test_a_checkpoint_of_another_shape_cannot_be_merged(stages: Stages) -> None:
    wider = SPEC.model.model_copy(update={"ffn_dim": 128})
    part = MergePart(model=wider, weights=[1.0, 1.0])
    inputs = {
        f"checkpoint:{index}": stages.ref("pretrain/trained", step) for index, step in enumerate((3, 6))
    }
    with pytest.raises(RuntimeError, match=r"has shape \(64, 32\) in .*, this model has \(128, 32\)"):
        stages.run("merge", "refused", part, inputs=inputs)
