"""Distillation in the engine: the formula over both models called directly, whatever the layout; a teacher
that stays as it is; the same bits after an interruption."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.model.model import ApertusModel, model_config
from apertus_model.trainer.checkpoint import CheckpointSource, load_tensors
from specs.launch import Parallel
from specs.mamba import Mamba, NewMixers
from specs.model import ModelSpec
from specs.stages.distill import DistillLoss
from tests.apertus_model.harness import (
    MODEL,
    Result,
    SyntheticSamples,
    difference,
    full,
    losses,
    same,
    segment,
    train,
)
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint, at
from tests.machine import slow

LARGER = MODEL.model_copy(update={"dim": 48, "n_layers": 3, "n_heads": 6, "ffn_dim": 96})
STUDENT = MODEL.model_copy(update={"n_layers": 4})
LOSS = DistillLoss(direction="reverse", temperature=2.0, weight=0.75)
HELDOUT = {"a": [SyntheticSamples()[index] for index in range(1000, 1003)]}
LAYOUTS = {
    "FSDP": Parallel(),
    "TP with SP": Parallel(tp=2, sequence_parallel=True),
    "CP": Parallel(cp=2, cp_load_balancer="head-tail"),
    "PP": Parallel(pp=2),
    "PP interleaved": Parallel(pp=2, pp_schedule="interleaved-1f1b"),
}


def spec_of(**changes: Any) -> Any:
    fields = {"model": STUDENT, "teacher": LARGER, "loss": LOSS, "z_loss": 0.01, "end_step": 4}
    checkpoints = {"checkpoint": {"interval": 2}, "validation": {"interval": 2}}
    return segment("distill", **{**fields, **checkpoints, **changes})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> LocalCheckpoint:
    folder = tmp_path_factory.mktemp("teacher")
    train(folder, segment(model=LARGER, end_step=2, checkpoint={"interval": 2}))
    return LocalCheckpoint(folder / "step-2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, teacher: LocalCheckpoint) -> tuple[Path, Result]:
    """Four steps of one process."""
    folder = tmp_path_factory.mktemp("student")
    (result,) = train(folder, spec_of(), teacher=teacher, heldout=HELDOUT, states=True)
    return folder, result


def built(spec: ModelSpec, checkpoint: LocalCheckpoint | None = None) -> ApertusModel:
    model = model_config(spec, sequence_length=16, attention="sdpa", seed=7).build()
    model.init_weights()
    if checkpoint is not None:
        state = dict(model.state_dict())
        load_tensors(state, checkpoint)
        model.load_state_dict(state)
    return model


def by_formula(teacher: LocalCheckpoint, rows: list[int]) -> dict[str, float]:
    """Loss, norm of its gradient and both parts of it, of the student's first step."""
    samples = [SyntheticSamples()[row] for row in rows]
    tokens, labels, positions = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("input", "labels", "positions")
    )
    student, kept = built(STUDENT), labels != -100
    logits = student(tokens, positions=positions)[kept].double()
    with torch.no_grad():
        wanted = built(LARGER, teacher)(tokens, positions=positions)[kept].double()
    log_p, log_q = ((x / LOSS.temperature).log_softmax(-1) for x in (wanted, logits))
    divergence = (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    ce = torch.nn.functional.cross_entropy(logits, labels[kept])
    loss = 0.75 * 2.0**2 * divergence + 0.25 * ce + 0.01 * logits.logsumexp(-1).square().mean()
    loss.backward()
    norms = torch.stack([parameter.grad.norm() for parameter in student.parameters()])  # type: ignore[union-attr]
    return {"loss": loss.item(), "grad_norm": norms.norm().item(), "divergence": divergence.item(),
            "cross_entropy": ce.item()}  # fmt: skip


def test_the_first_step_is_the_formula_over_both_models(
    whole: tuple[Path, Result], teacher: LocalCheckpoint
) -> None:
    row = whole[1].rows[0]
    assert {name: row[name] for name in by_formula(teacher, [0, 1, 2, 3])} == pytest.approx(
        by_formula(teacher, [0, 1, 2, 3]), rel=2e-5
    )


def test_held_out_losses_are_cross_entropy_of_the_student(whole: tuple[Path, Result]) -> None:
    folder, result = whole
    model, total = built(STUDENT, LocalCheckpoint(folder / "step-4")), torch.zeros(2, dtype=torch.float64)
    for sample in HELDOUT["a"]:
        tokens, labels, positions = (torch.from_numpy(values)[None] for values in sample)
        logits = model(tokens, positions=positions).detach().double()
        nats = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
        total += torch.tensor([nats, (labels >= 0).sum()])
    assert result.heldout[4]["a"].nats == pytest.approx((total[0] / total[1]).item(), rel=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "PP" else pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layout_trains_as_one_process_does(
    tmp_path: Path, whole: tuple[Path, Result], teacher: LocalCheckpoint, name: str
) -> None:
    spec, reference = spec_of(parallel=LAYOUTS[name], micro_batch_size=1), whole[1]
    first, *others = train(tmp_path, spec, processes=2, teacher=teacher, heldout=HELDOUT)
    for other in others:
        first.weights |= other.weights
    assert losses(first) == pytest.approx(losses(reference), rel=2e-6)
    assert difference(first.weights, reference.weights) < 2e-6
    assert [first.heldout[step]["a"].nats for step in (2, 4)] == pytest.approx(
        [reference.heldout[step]["a"].nats for step in (2, 4)], rel=2e-6
    )
    if "PP" not in name:
        columns = [
            [(row["divergence"], row["cross_entropy"]) for row in run.rows] for run in (first, reference)
        ]
        np.testing.assert_allclose(*columns, rtol=2e-5)


def test_an_interrupted_run_has_the_same_bits(
    tmp_path: Path, whole: tuple[Path, Result], teacher: LocalCheckpoint
) -> None:
    folder, reference = whole
    source = CheckpointSource(LocalCheckpoint(folder / "step-2"), 2, optimizer=True)
    (resumed,) = train(tmp_path, spec_of(), source=source, begin_step=2, teacher=teacher, states=True)
    assert same(resumed.weights, reference.weights) and same(resumed.optimizer, reference.optimizer)


def frozen(trainer: Any, expected: dict[str, torch.Tensor]) -> None:
    model = trainer.config.objective._teacher
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    state = full(model.state_dict())
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert same(state, {name: value.bfloat16() for name, value in expected.items()})


def test_the_teacher_is_stored_in_the_precision_of_the_pass_and_stays_as_it_is(
    tmp_path: Path, teacher: LocalCheckpoint
) -> None:
    spec = spec_of(precision={"param": "bfloat16"}, end_step=2, checkpoint={})
    check = partial(frozen, expected=dict(built(LARGER, teacher).state_dict()))
    train(tmp_path, spec, teacher=teacher, inspect=check)


@pytest.mark.parametrize("initial", ["attention", slow("random")])
def test_a_student_with_new_mixers_begins_with_what_its_parent_has_of_them(
    tmp_path: Path, teacher: LocalCheckpoint, initial: Any
) -> None:
    new = NewMixers(layers=[1], chunk=8, initial=initial)
    hybrid = LARGER.model_copy(update={"mamba": Mamba(layers=[1], chunk=8)})
    spec = spec_of(model=hybrid, mamba=new, seed=3, end_step=3, checkpoint={"interval": 1})
    begin = CheckpointSource(
        teacher, 2, optimizer=False, new_adapters=True, new_parameters=spec.new_parameters
    )
    (begun,) = train(tmp_path / "begun", spec, teacher=teacher, source=begin, stop_at=0)
    (first,) = train(tmp_path / "whole", spec, teacher=teacher, source=begin)
    (rest,) = train(tmp_path / "rest", spec, teacher=teacher, source=at(tmp_path / "whole", 1), begin_step=1)
    assert losses(rest) == losses(first)[1:] and same(rest.weights, first.weights)
    drawn = model_config(hybrid, sequence_length=16, attention="sdpa", seed=3).build()
    drawn.init_weights()
    stored = dict(built(LARGER, teacher).state_dict())
    for name, weight in begun.weights.items():
        of_mixer = name.startswith("layers.1.attention.")
        is_new = of_mixer and (initial == "random" or name not in stored)
        assert torch.equal(weight, drawn.state_dict()[name] if is_new else stored[name]), name
    assert first.rows[0]["divergence"] > 0
