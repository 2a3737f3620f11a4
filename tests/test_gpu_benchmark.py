"""The comparison of training speed on a GPU, with tiny shapes on the CPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from apertus_model.rehearsal.classes import CLASSES, GAPS, class_of
from apertus_model.rehearsal.records import RankFailure, RankReport, RankTask, Rehearsed
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import race
from benchmarks.gpu.profile import STEPS, predicted, seconds_by_class
from benchmarks.gpu.race import OUT_OF_TIME, ROUNDS, Race, groups
from benchmarks.gpu.records import Record, Round, Row, page
from benchmarks.gpu.shapes import BARE, LIMIT, TITAN, Shape, Trial, shapes, tiny, trials
from flows.planning.estimate import flops
from specs.cluster import known_gpu

SMALL = shapes()[1]
GPU = (9, 0)  # its compute capability


def row(measured: Race, name: str) -> Row:
    return next(row for trial, row in measured.rows.items() if trial.name == name)


def run(entries: list[Trial], capability: tuple[int, int] | None, *, seconds: float, profile: bool) -> Race:
    """A finished race of contenders that all fit on the GPU together."""
    measured = Race(entries, capability, seconds)
    for _ in measured.run(1e15, profile):
        assert Record(made="today", machine={}, sheet=None, seconds=1, rows=[*measured.rows.values()])
    return measured


@pytest.mark.slow
def test_all_contenders_train_the_same_tokens_and_the_same_model_with_the_same_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(race, "PATIENCE", 900.0)  # this machine may be busy
    shape = tiny(SMALL)
    broken = Trial(shape, "broken", "nothing")  # type: ignore[arg-type]
    whole = run([*trials(shape), broken], None, seconds=900, profile=True)
    trained = [LIMIT, "ours, eager", f"{TITAN}, eager", BARE]
    assert row(whole, "broken").why == "KeyError: 'nothing'"
    assert [row(whole, name).why for name in trained] == [""] * len(trained)
    tokens = {part.tokens for name in trained for part in row(whole, name).rounds}
    assert tokens == {shape.steps * shape.tokens}
    assert all(len(row(whole, name).rounds) == ROUNDS for name in trained)
    ours, bare = row(whole, "ours, eager").first_loss, row(whole, BARE).first_loss
    assert ours == pytest.approx(bare, rel=1e-6)
    for name in trained[1:]:
        profile = row(whole, name).profile
        assert profile["products"] > 0
        assert set(profile) == set(CLASSES)
    record = Record(made="today", machine={"GPU": "none"}, sheet=None, seconds=1, rows=[*whole.rows.values()])
    assert Record.model_validate_json(record.model_dump_json()) == record
    text = page(record)
    assert f"x {TITAN}, eager" in text
    assert "| KeyError: 'nothing' |" in text
    assert text.count("| compiled layers are compared on a GPU |") == 5


def serve(trial: Trial, threads: int, folder: str, connection: Any) -> None:
    """A process of a contender, without torch."""
    if trial.name == "ours, deterministic":
        os.kill(os.getpid(), signal.SIGKILL)  # before it has read what it is asked
    assert connection.recv() == "build"
    if trial.name == BARE:
        time.sleep(600)
    connection.send((float("nan"), None))
    while request := connection.recv():
        if trial.name == f"{TITAN}, eager":
            os._exit(3)
        if trial.name == f"{TITAN}, compiled":
            raise ValueError("no such kernel\nmore")
        seconds = dict.fromkeys(CLASSES, 1.0)
        connection.send(seconds if request == "profile" else (10 * trial.shape.steps, 0.5))


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders without torch."""
    monkeypatch.setattr(race, "WORK", __name__)
    monkeypatch.setattr(race, "PATIENCE", 5.0)
    monkeypatch.setattr(race, "context", lambda tiny: multiprocessing.get_context("fork"))


FAIL = {
    BARE: "it did not answer in 5 seconds",
    f"{TITAN}, eager": "its process ended with code 3",
    f"{TITAN}, compiled": "ValueError: no such kernel",
    "ours, float8": "this GPU has no float8",
    "ours, deterministic": "its process ended with code -9",
}


@pytest.mark.usefixtures("faked")
def test_contenders_that_fail_or_hang_are_rows_that_say_why_and_the_others_continue() -> None:
    whole = run(trials(SMALL), (8, 0), seconds=900, profile=True)
    reasons = {name: row(whole, name).why for name in (*FAIL, LIMIT, "ours, eager")}
    assert reasons == {**FAIL, LIMIT: "", "ours, eager": ""}
    assert [(part.group, part.number) for part in row(whole, LIMIT).rounds] == [(0, 0), (0, 1), (0, 2)]
    assert row(whole, "ours, eager").speeds == [20 * SMALL.steps] * ROUNDS
    assert row(whole, "ours, eager").profile[GAPS] == 1
    record = Record(
        made="today", machine={"name": "NVIDIA A100"}, sheet="A100", seconds=1, rows=[*whole.rows.values()]
    )
    assert len(Record.model_validate_json(record.model_dump_json()).rows) == len(trials(SMALL))
    assert "ValueError: no such kernel" in page(record)


@pytest.mark.usefixtures("faked")
def test_when_the_time_is_over_what_was_not_measured_is_named() -> None:
    short = run(trials(SMALL), GPU, seconds=0, profile=False)
    assert {row.why for row in short.rows.values()} == {OUT_OF_TIME}


@pytest.mark.slow
def test_the_limit_makes_the_products_that_the_plan_counts(tmp_path: Path) -> None:
    from benchmarks.gpu.contenders import limit
    from tests.apertus_model.step_costs import flop_counter

    trial = trials(tiny(SMALL))[0]
    step, _ = limit(trial, str(tmp_path))
    with flop_counter() as counter:
        tokens = step()
    assert counter.get_total_flops() == flops.training(trial.segment) * tokens


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: shape.name)
def test_llama_has_nearly_as_many_parameters_and_the_same_operations(shape: Shape) -> None:
    ours, theirs = (next(t for t in trials(shape) if t.kind == kind) for kind in ("ours", "torchtitan"))
    assert theirs.model.parameters == pytest.approx(ours.model.parameters, rel=1e-3)
    assert flops.training(theirs.segment) == flops.training(ours.segment)


def test_what_fits_together_is_a_group_with_the_limit_and_the_important_ones_come_first() -> None:
    entries = [trial for shape in shapes() for trial in trials(shape)]
    planned = groups(entries, 141e9)
    assert all(sum(trial.memory for trial in group) < 141e9 for group in planned)
    assert all(group[0].name == LIMIT for group in planned)
    assert {trial for group in planned for trial in group} == set(entries)
    assert [trial.name for trial in planned[0]][1:3] == ["ours, compiled", f"{TITAN}, compiled"]
    assert [group[0].shape.name for group in planned[:3]] == [shape.name for shape in shapes()]
    assert {len(group) for group in groups(entries, 1e9)} == {2}


def test_ratios_are_of_rounds_in_turns_and_else_of_medians() -> None:
    def measured(group: int, *seconds: float) -> Row:
        rounds = [
            Round(group=group, number=number, tokens=100, seconds=time) for number, time in enumerate(seconds)
        ]
        return Row(shape="s", contender="c", parameters=1, rounds=rounds)

    assert measured(0, 1, 2).beside(measured(0, 2, 2)) == [2, 1]
    assert measured(0, 1, 1).beside(measured(1, 4, 4)) == [4]
    assert measured(0).beside(measured(0, 1)) == []


def trace(file: Path) -> Path:
    """Two steps in 100 microseconds: kernels that overlap, launched by operators within others."""

    def event(
        cat: str, name: str, begin: float, seconds: float, number: int = 0, tid: int = 1
    ) -> dict[str, Any]:
        return {
            "cat": cat,
            "name": name,
            "ts": begin,
            "dur": seconds,
            "tid": tid,
            "args": {"External id": number},
        }

    calls = [
        event("user_annotation", STEPS, 1000, 100),
        event("cpu_op", "aten::mm", 1001, 2, 1),
        event("cpu_op", "MyCrossEntropyBackward", 1004, 9, 2),
        event("cpu_op", "aten::mul", 1005, 2, 3),
        event("user_annotation", "Optimizer.step#AdamW.step", 1020, 9, 4),
        event("cpu_op", "aten::mul", 1021, 2, 5),
    ]
    kernels = [
        event("kernel", "nvjet_tst", 1010, 20, 1, 7),
        event("kernel", "elementwise_kernel", 1025, 10, 3, 7),
        event("kernel", "elementwise_kernel", 1050, 10, 5, 7),
        event("gpu_memcpy", "Memcpy DtoD", 1060, 5, 99, 8),
        event("kernel", "triton_poi_fused_mul_silu_0", 1095, 50, 0, 7),
    ]
    file.write_text(json.dumps({"traceEvents": [*calls, *kernels]}))
    return file


def test_the_classes_of_a_trace_are_those_of_its_operators_and_sum_to_the_step(tmp_path: Path) -> None:
    by_class = seconds_by_class(trace(tmp_path / "trace.json"), 2)
    microseconds = {kind: round(2e6 * seconds, 3) for kind, seconds in by_class.items() if seconds}
    assert microseconds == {
        "products": 15, "embedding and loss": 10, "optimizer": 10, "casts and copies": 5, "activation": 5,
        GAPS: 55,
    }  # fmt: skip
    assert sum(by_class.values()) == pytest.approx(50e-6)


def test_names_of_kernels_and_operators_have_classes() -> None:
    classes = {
        "sm90_xmma_gemm_bf16": "products",
        "mm": "products",
        "flash_fwd_kernel": "attention",
        "_fused_adamw_": "optimizer",
        "_fused_rms_norm_backward": "norms",
        "_xielu_forward": "activation",
        "embedding_dense_backward": "embedding and loss",
        "split_with_sizes_copy": "casts and copies",
        "add": "other",
    }
    assert {name: class_of(name) for name in classes} == classes
    assert class_of("aten::linear", "aten::to", "aten::copy_") == "casts and copies"


def test_predictions_have_the_same_classes() -> None:
    report = Rehearsed.model_construct(classes={"products": 4.0, "optimizer": 2.0}, waited_seconds=0.5)
    expected = dict.fromkeys(CLASSES, 0.0) | {"products": 4, "optimizer": 2, GAPS: 0.5}
    assert predicted(report) == expected


def test_a_record_gets_predictions_later_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def reports(asked: list[RankTask]) -> list[RankReport]:
        assert {(task.gpu, task.device) for task in asked} == {("H200", "cuda")}
        rehearsed = Rehearsed.model_construct(classes={}, waited_seconds=0.5)
        failure = RankFailure(error="no such name", place="")
        return [RankReport.model_construct(rehearsed=rehearsed), RankReport(rank=0, failure=failure)]

    monkeypatch.setattr(command, "run_ranks", reports)
    rows = [
        Row(shape=SMALL.name, contender=name, parameters=1, profile=dict.fromkeys(CLASSES, 1.0))
        for name in ("ours, eager", BARE, "ours, float8")
    ]
    record = Record(made="today", machine={}, sheet="H200", seconds=1, rows=rows)
    command.rehearse(record)
    assert [bool(row.predicted) for row in rows] == [True, False, False]
    assert record.machine == {"not predicted": "no such name"}


def test_a_device_has_the_data_sheet_of_its_name_and_memory() -> None:
    devices = {
        ("NVIDIA H200", 150.1e9): "H200",
        ("NVIDIA H100 80GB HBM3", 85e9): "H100",
        ("NVIDIA A100-SXM4-40GB", 42.3e9): "A100-40GB",
        ("NVIDIA H100 PCIe", 40e9): None,
        ("NVIDIA L4", 24e9): None,
    }
    assert {device: known_gpu(*device) for device in devices} == devices
