"""Steps that are not taken: the weights are those of a run in which their updates were left out, by an
independent loop."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.model.model import model_config
from apertus_model.trainer.anomalies import AnomalyDetector
from apertus_model.trainer.checkpoint import CheckpointSource
from apertus_model.trainer.config import trainer_config
from apertus_model.trainer.loader import collate
from specs.anomalies import Anomalies, remark
from specs.errors import StageError
from specs.launch import Parallel
from specs.optimizer import OptimizerSpec
from tests.apertus_model.harness import (
    MODEL,
    ListedSamples,
    Result,
    WeightedSamples,
    difference,
    losses,
    same,
    segment,
    train,
)
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.machine import slow


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the loops of this process, whose tensors are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The decisions, on numbers


def judged(policy: Anomalies, values: list[float], *, norms: list[float] | None = None) -> list[str | None]:
    detector = AnomalyDetector(policy, 0)
    events = [
        detector.check(step, loss, norm)
        for step, (loss, norm) in enumerate(zip(values, norms or [1.0] * len(values), strict=True), 1)
    ]
    return [event.action if event else None for event in events]


def test_a_spike_exceeds_the_mean_of_accepted_values_by_the_stated_number_of_standard_deviations() -> None:
    policy = Anomalies(spike="skip", window=4, spike_threshold=2.0, max_events=1000)
    first = [3.0, 1.0, 3.0, 1.0]  # mean 2, standard deviation 1: 4 is allowed, more is not
    assert judged(policy, [*first, 4.0]) == [None] * 5
    assert judged(policy, [*first, 4.001]) == [None] * 4 + ["skip"]
    # what is skipped is not compared with
    assert judged(policy, [*first, 9.0, 9.0, 4.0]) == [None] * 4 + ["skip", "skip", None]
    assert judged(policy, [9.0, 1.0, 1.0, 9.0]) == [None] * 4  # not before the window is full
    norms = [3.0, 1.0, 3.0, 1.0, 4.001]
    assert judged(policy, [1.0] * 5, norms=norms) == [None] * 4 + ["skip"]
    random = np.random.default_rng(0)
    values = random.normal(5, 1, 500).tolist()
    expected: list[float] = []
    found = []
    for value in values:
        spikes = len(expected) >= 4 and value > np.mean(expected[-4:]) + 2 * np.std(expected[-4:])
        found.append("skip" if spikes else None)
        expected += [] if spikes else [value]
    assert judged(policy, values) == found
    assert 10 < found.count("skip") < 490


def test_what_is_not_finite_stops_by_default_and_spikes_are_reported() -> None:
    assert judged(Anomalies(), [1.0] * 200 + [1e9]) == [None] * 200 + ["report"]
    assert judged(Anomalies(report_threshold=None), [1.0] * 200 + [1e9]) == [None] * 201
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert judged(Anomalies(), [1.0, bad]) == [None, "stop"]
        assert judged(Anomalies(), [1.0, 1.0], norms=[1.0, bad]) == [None, "stop"]


def test_the_policy_stops_after_so_many_events_and_says_what_to_do() -> None:
    nan = float("nan")
    detector = AnomalyDetector(Anomalies(nonfinite="skip", max_events=2), 0)
    events = [detector.check(step, nan, 1.0) for step in (1, 2, 3)]
    assert [event.action for event in events if event] == ["skip", "skip", "stop"]
    assert events[2] is not None
    assert (
        "2 steps of this segment were skipped or rolled back before, and anomalies.max_events allows no more"
        in str(detector.error(events[2]))
    )
    detector = AnomalyDetector(Anomalies(), 0)
    event = detector.check(7, 2.0, float("inf"))
    assert event is not None
    error = detector.error(event)
    assert isinstance(error, ValueError)  # not worth another try
    assert (
        str(error) == "step 7: the grad norm is not finite; training stops; lower the learning rate, or set"
        " anomalies.nonfinite: skip or rollback"
    )


@pytest.mark.parametrize(
    ("policy", "before", "reason"),
    [
        ({"nonfinite": "skip", "max_events": 0}, [], "; 0 steps of this segment were skipped or rolled back"),
        ({"spike": "skip", "max_events": 1}, [1.0, 3.0, 9.0], ", or set anomalies.nonfinite: skip"),
    ],
)
def test_an_error_names_the_setting_that_stopped_training(
    policy: dict[str, Any], before: list[float], reason: str
) -> None:
    detector = AnomalyDetector(Anomalies(window=2, spike_threshold=1, **policy), 0)
    events = [detector.check(step, loss, 1.0) for step, loss in enumerate([*before, float("nan")], 1)]
    assert [event.action for event in events if event] == ["skip"] * policy["max_events"] + ["stop"]
    assert events[-1] is not None
    assert reason in str(detector.error(events[-1]))


def test_a_rollback_goes_to_a_multiple_that_is_old_enough_whatever_was_committed() -> None:
    policy = Anomalies(nonfinite="rollback", rollback_interval=10, rollback_margin=5)
    assert [policy.rollback_step(step, 0) for step in (14, 15, 24, 25, 31)] == [None, 10, 10, 20, 20]
    assert policy.rollback_step(25, 20) is None  # the segment began there
    assert judged(policy, [float("nan")]) == ["skip"]


def noisy(level: float, steps: int, noise: float = 0.1, seed: int = 0) -> list[float]:
    """Values around a level, with noise in proportion to it."""
    return (level * np.exp(np.random.default_rng(seed).normal(0, noise, steps))).tolist()


def test_a_gradient_norm_of_47_among_14s_is_reported_from_the_21st_step_on_and_the_step_is_taken() -> None:
    for before in (20, 21, 60, 500):
        detector = AnomalyDetector(Anomalies(), 0)
        norms = [*noisy(14, before), 47.0]
        *quiet, event = [detector.check(step, 3.0, norm) for step, norm in enumerate(norms, 1)]
        assert not any(quiet) and event is not None
        assert (event.quantity, event.action, event.loss, event.grad_norm) == (
            "grad_norm",
            "report",
            3.0,
            47.0,
        )
        assert event.text.startswith(f"step {before + 1}: the grad norm of 47 spikes above ")
        assert event.text.endswith("; training continues")
    assert judged(Anomalies(), [3.0] * 20, norms=[*noisy(14, 19), 47.0]) == [None] * 20


def test_reports_follow_the_stated_bound() -> None:
    random = np.random.default_rng(3)
    values = [float(abs(value)) for value in random.standard_cauchy(2000)]
    found = []
    for step, value in enumerate(values):
        last = np.log(values[max(0, step - 128) : step])
        distance = np.log(value) - np.median(last) if step else 0.0
        reach = 2.5 * max(1.4826 * np.median(abs(last - np.median(last))), 0.01) if step else 0.0
        before = [values[at] for at in found if at >= step - 128]
        extreme = value > max(before, default=0) if distance > 0 else value < min(before, default=1e9)
        if step >= 20 and abs(distance) > reach and extreme:
            found.append(step)
    actions = judged(Anomalies(report_threshold=2.5, window=40), [1.0] * 2000, norms=values)
    assert [step for step, action in enumerate(actions) if action] == found
    assert 10 < len(found) < 200
    assert "report" not in judged(Anomalies(), [-value for value in values])  # not a positive quantity


def test_healthy_noise_is_silent_a_collapse_and_a_new_level_are_reported_once() -> None:
    falling = (np.array(noisy(1, 5_000)) * np.linspace(9, 2, 5_000)).tolist()
    assert judged(Anomalies(), falling, norms=noisy(2, 5_000, 0.3, seed=1)) == [None] * 5_000
    assert judged(Anomalies(), [4.0] * 50, norms=[*noisy(1, 40), *[0.0] * 10]).count("report") == 1
    steps = [*noisy(1, 200), *noisy(9, 200, 0.01)]
    assert 1 <= judged(Anomalies(), steps).count("report") <= 6  # new maxima


def test_reports_do_not_count_as_steps_that_were_not_taken() -> None:
    values = [*noisy(1, 30), 1e3, 1e4, float("nan")]
    policy = Anomalies(nonfinite="skip", max_events=1)
    assert judged(policy, values)[30:] == ["report", "report", "skip"]


def test_a_norm_that_is_not_finite_is_reported_once() -> None:
    detector = AnomalyDetector(Anomalies(), 0)
    assert detector.check_norms(100, {"weights/output": 3.0, "exp_avg_sq/output": 0.0}) == []
    for step in (200, 300):
        found = detector.check_norms(step, {"weights/output": float("inf"), "exp_avg_sq/output": 0.0})
        texts = [event.text for event in found]
        told = "step 200: the norm of weights/output is not finite; training continues"
        assert texts == ([told] if step == 200 else [])
        detector = AnomalyDetector(Anomalies(), 0, detector.state())


def test_a_remark_names_the_first_events_of_a_part_or_of_its_checkpoint() -> None:
    detector = AnomalyDetector(Anomalies(nonfinite="skip"), 0)
    for step in range(1, 6):
        detector.check(step, float("nan"), 1.0)
    told = "; ".join(f"step {step}: the loss is not finite; the step is skipped" for step in (1, 2, 3))
    for facts in ({"anomalies": detector.state()}, {"anomalies": detector.state()["events"]}):
        assert remark(facts) == f"5 anomalies: {told}; and 2 more"
    assert remark({}) == remark({"anomalies": []}) == remark({"anomalies": {"loss": [1.0]}}) == ""


def test_a_detector_that_resumes_from_its_state_decides_the_same() -> None:
    policy = Anomalies(
        spike="skip", nonfinite="skip", window=5, spike_threshold=4, report_threshold=1, max_events=100
    )
    values = [*np.random.default_rng(1).normal(3, 0.5, 400).tolist()]
    values[20] = float("nan")
    whole, parts = AnomalyDetector(policy, 0), AnomalyDetector(policy, 0)
    for step, value in enumerate(values, 1):
        assert whole.check(step, value, value / 2) == parts.check(step, value, value / 2)
        parts = AnomalyDetector(policy, 0, json.loads(json.dumps(parts.state())))
    assert whole.state() == parts.state()
    assert {"skip", "report"} == {event["action"] for event in whole.events}


# The engine

POISONED = 4  # the step, of four samples each
STEPS = 8


class PoisonedSamples(WeightedSamples):
    """All labels weigh the same, but for a NaN in a sample of step 4."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample._replace(
            weights=np.full(self.length, np.nan if index == 4 * POISONED - 2 else 1.0, np.float32)
        )


def spec_of(**changes: Any) -> Any:
    fields = {
        "end_step": STEPS,
        "prompt_weight": 0.5,  # weighted cross-entropy
        "optimizer": OptimizerSpec(name="adamw", lr=1e-2).resolved({}),
        "checkpoint": {"interval": 3},
    }
    return segment("sft", **{**fields, **changes})


def oracle(spec: Any, left_out: set[int], restored: dict[int, int]) -> dict[str, torch.Tensor]:
    """Weights after training in a plain loop: some steps' updates are left out, and before the next one an
    earlier state comes back."""
    model = model_config(MODEL, sequence_length=16, attention="sdpa", seed=7).build()
    model.init_weights()
    settings, samples = spec.optimizer, ListedSamples()
    groups = [
        {
            "params": [p for p in model.parameters() if (p.ndim > 1) is decayed],
            "weight_decay": settings.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=settings.betas, eps=settings.eps)
    states = {}
    for step in range(1, spec.end_step + 1):
        if step not in left_out:
            inputs, labels = collate([samples[index] for index in range(4 * (step - 1), 4 * step)])
            for group in optimizer.param_groups:
                group["lr"] = spec.lr_at(step - 1)
            logits = model(inputs["input"], inputs["positions"])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
        if step in restored:
            weights, moments = states[restored[step]]
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
        states[step] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return dict(model.state_dict())


def run(folder: Path, spec: Any, processes: int = 1, **arguments: Any) -> Result:
    results = train(folder, spec, processes=processes, data=PoisonedSamples, states=True, **arguments)
    assert all(result.events == results[0].events for result in results)
    return results[0]


@pytest.mark.parametrize(
    ("processes", "parallel"), [(1, Parallel()), slow(2, Parallel()), (2, Parallel(tp=2))]
)
def test_a_skipped_step_changes_neither_weights_nor_moments_and_training_continues(
    tmp_path: Path, processes: int, parallel: Parallel
) -> None:
    spec = spec_of(anomalies=Anomalies(nonfinite="skip"), parallel=parallel)
    result = run(tmp_path, spec, processes)
    assert [(event.step, event.quantity, event.action, event.loss) for event in result.events] == [
        (POISONED, "loss", "skip", None)
    ]
    assert [row["step"] for row in result.rows] == [1, 2, 3, 5, 6, 7, 8]
    assert difference(result.weights, oracle(spec, {POISONED}, {})) < 1e-5
    assert difference(result.weights, oracle(spec, set(), {})) > 1e-3
    assert {float(value.max()) for name, value in result.optimizer.items() if name.endswith(".step")} == {
        STEPS - 1
    }


ROLLBACK = Anomalies(nonfinite="rollback", rollback_interval=2, rollback_margin=1)


@pytest.mark.parametrize("processes", [slow(1), 2])
def test_a_rollback_brings_an_earlier_state_back_and_jumps_over_the_data(
    tmp_path: Path, processes: int
) -> None:
    spec = spec_of(anomalies=ROLLBACK)
    result = run(tmp_path, spec, processes)
    assert [(event.step, event.action, event.to) for event in result.events] == [(POISONED, "rollback", 2)]
    assert result.committed == [2, 3, 4, 6, 8]  # at the interval, and where a rollback may go to
    assert result.rows[-1]["tokens"] == STEPS * 64
    assert difference(result.weights, oracle(spec, {POISONED}, {POISONED: 2})) < 1e-5
    assert difference(result.weights, oracle(spec, {POISONED}, {})) > 1e-3
    steps = {float(value.max()) for name, value in result.optimizer.items() if name.endswith(".step")}
    assert steps == {2 + STEPS - POISONED}


@pytest.mark.parametrize("begin", [3, slow(4), slow(6)])
def test_resuming_before_and_after_a_rollback_gives_the_same_bits(tmp_path: Path, begin: int) -> None:
    whole = run(tmp_path, spec_of(anomalies=ROLLBACK))
    source = CheckpointSource(LocalCheckpoint(tmp_path / f"step-{begin}"), begin, optimizer=True)
    rest = run(
        tmp_path, spec_of(anomalies=ROLLBACK), source=source, begin_step=begin, anomalies=whole.facts[begin]
    )
    assert same(rest.weights, whole.weights)
    assert same(rest.optimizer, whole.optimizer)
    assert rest.facts[STEPS] == whole.facts[STEPS]


@pytest.mark.parametrize("begin", [3, slow(6)])
def test_resuming_among_spikes_gives_the_same_decisions_and_bits(tmp_path: Path, begin: int) -> None:
    spec = spec_of(anomalies=Anomalies(nonfinite="skip", spike="skip", window=2, spike_threshold=0.1))
    whole = run(tmp_path / "whole", spec)
    spikes = [event.step for event in whole.events if event.limit is not None]
    assert 2 <= len(spikes) < STEPS - 2
    assert difference(whole.weights, oracle(spec, {POISONED, *spikes}, {})) < 1e-5
    source = CheckpointSource(LocalCheckpoint(tmp_path / "whole" / f"step-{begin}"), begin, optimizer=True)
    rest = run(tmp_path / "rest", spec, source=source, begin_step=begin, anomalies=whole.facts[begin])
    assert same(rest.weights, whole.weights)
    assert rest.events == [event for event in whole.events if event.step > begin]
    assert losses(rest) == [row["loss"] for row in whole.rows if row["step"] > begin]


@pytest.mark.parametrize("processes", [slow(1), 2])
def test_what_is_not_finite_ends_a_run_with_an_error_and_its_last_checkpoint(
    tmp_path: Path, processes: int
) -> None:
    with pytest.raises(RuntimeError, match=r"AnomalyError: step 4: the loss is not finite; training stops"):
        run(tmp_path, spec_of(), processes)
    assert (tmp_path / "step-3" / "index.json").exists()
    assert not (tmp_path / "step-4").exists()


def test_an_optimizer_that_looks_at_a_batch_before_its_loss_is_known_cannot_skip_it() -> None:
    spec = spec_of(
        optimizer=OptimizerSpec(name="sophia", lr=1e-3).resolved({}), anomalies=Anomalies(spike="skip")
    )
    unused: Any = None  # refused before anything is used
    with pytest.raises(StageError, match="no step can be skipped"):
        trainer_config(spec, unused, unused, unused, world_size=1)
