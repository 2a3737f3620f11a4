"""Mixers that are brought close to attention, layer by layer: the formulas written out; the same on several
processes and after an interruption; nothing but the mixers changes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.model.mamba import matrix
from apertus_model.model.model import ApertusModel, model_config
from apertus_model.trainer.checkpoint import CheckpointSource, load_tensors
from apertus_model.trainer.objectives.alignment import attention_matrix
from specs.mamba import Mamba, NewMixers
from specs.model import ModelSpec
from specs.stages.distill import DistillLoss
from tests.apertus_model.harness import MODEL, Result, losses, same, segment, train
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint, at
from tests.apertus_model.trainer.layouts import HELDOUT, PackedSamples
from tests.machine import slow
from tests.numerics import largest_difference

TEACHER = MODEL.model_copy(update={"n_layers": 4})
LAYERS = [1, 3]
STUDENT = TEACHER.model_copy(update={"mamba": Mamba(layers=LAYERS, chunk=8)})
LENGTH = 32
NOT_IN_THE_MATRIX = ("conv_x", "z_proj.weight", "out_norm", "wo.weight", "wv.weight")


def spec_of(compare: Any, **changes: Any) -> Any:
    fields = {
        "model": STUDENT, "teacher": TEACHER, "loss": DistillLoss(compare=compare), "seed": 3,
        "mamba": NewMixers(layers=LAYERS, chunk=8), "end_step": 4, "sequence_length": LENGTH,
        "trainable": [f"layers.{layer}.attention.*" for layer in LAYERS],
        "checkpoint": {"interval": 2}, "validation": {"interval": 2},
    }  # fmt: skip
    return segment("distill", **{**fields, **changes})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> LocalCheckpoint:
    folder = tmp_path_factory.mktemp("teacher")
    train(folder, segment(model=TEACHER, end_step=2, sequence_length=LENGTH), data=PackedSamples)
    return LocalCheckpoint(folder / "step-2")


def run(
    folder: Path, spec: Any, teacher: LocalCheckpoint, processes: int = 1, **arguments: Any
) -> list[Result]:
    begin = CheckpointSource(
        teacher, 2, optimizer=False, new_adapters=True, new_parameters=spec.new_parameters
    )
    given = {"source": begin, **arguments}
    return train(
        folder, spec, processes=processes, teacher=teacher, data=PackedSamples, heldout=HELDOUT, **given
    )


@pytest.fixture(scope="module", params=[slow("matrix"), "hidden"])
def whole(
    request: Any, tmp_path_factory: pytest.TempPathFactory, teacher: LocalCheckpoint
) -> tuple[str, Path, Result]:
    """Four steps of one process."""
    folder = tmp_path_factory.mktemp("whole")
    return request.param, folder, run(folder, spec_of(request.param), teacher)[0]


def built(spec: ModelSpec, checkpoint: LocalCheckpoint) -> ApertusModel:
    model = model_config(spec, sequence_length=LENGTH, attention="sdpa", seed=3).build()
    model.init_weights()
    new = NewMixers(layers=LAYERS).new_parameters(4) if spec.mamba else ()
    state = {name: one for name, one in model.state_dict().items() if name not in new}
    load_tensors(state, checkpoint)
    model.load_state_dict(state, strict=False)
    return model.double()


def softmax_matrix(attention: Any, read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Head by head and token by token."""
    rows, length, _ = read.shape
    heads, width, again = attention.n_heads, attention.head_dim, attention.n_heads // attention.n_kv_heads
    found = torch.zeros(rows, heads, length, length, dtype=read.dtype)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (-1, width))
        return x / (x.square().mean(-1, keepdim=True) + TEACHER.norm_eps).sqrt() * weight

    linear = attention.qkv_linear
    queries = normed(read @ linear.wq.weight.T, attention.q_norm.weight)
    keys = normed(read @ linear.wk.weight.T, attention.k_norm.weight)
    table = attention.rope.cache.double()

    def turned(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        cosines, sines = table[place].chunk(2)
        a, b = x.chunk(2)
        return x * cosines + torch.cat([-b, a]) * sines

    for row, head, token in itertools.product(range(rows), range(heads), range(length)):
        begin = max(0, token - int(positions[row, token]))  # of its document
        query = turned(queries[row, token, head], positions[row, token])
        seen = [
            turned(keys[row, place, head // again], positions[row, place])
            for place in range(begin, token + 1)
        ]
        scores = torch.stack([query @ key for key in seen]) / math.sqrt(width)
        found[row, head, token, begin : token + 1] = scores.softmax(0)
    return found


def by_formula(compare: str, teacher: LocalCheckpoint, rows: list[int]) -> tuple[float, float]:
    """Loss and norm of its gradient of the student's first step, in float64."""
    samples = [PackedSamples()[row] for row in rows]
    tokens, positions = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("input", "positions")
    )
    taught, student = built(TEACHER, teacher), built(STUDENT, teacher)
    distances = []
    mask = taught.get_attention_masks(positions)
    hidden = taught.tok_embeddings(tokens)
    for name, layer in taught.layers.items():
        read = layer.attention_norm(hidden).detach()
        added = layer.attention(read, mask, positions)
        if int(name) in LAYERS:
            mixer = student.layers[name].attention
            if compare == "hidden":
                distances.append((mixer(read, None, positions) - added.detach()).norm(dim=-1).mean())
            else:
                skip = torch.diag_embed(mixer.d[:, None].expand(-1, LENGTH))
                difference = matrix(mixer.recurrence(read, positions)) + skip
                difference = difference - softmax_matrix(layer.attention, read, positions).detach()
                distances.append(difference.square().sum((-2, -1)).sqrt().mean())
        hidden = hidden + added
        hidden = hidden + layer.feed_forward(layer.ffn_norm(hidden))
    loss = torch.stack(distances).mean()
    loss.backward()
    mixers = (student.layers[str(layer)].attention for layer in LAYERS)
    gradients = [one.grad.norm() for mixer in mixers for one in mixer.parameters() if one.grad is not None]
    return loss.item(), torch.stack(gradients).norm().item()


def test_the_first_step_is_the_formula(whole: tuple[str, Path, Result], teacher: LocalCheckpoint) -> None:
    compare, _, result = whole
    first, each = result.rows[0], [result.rows[0][f"distance_{layer}"] for layer in LAYERS]
    assert (first["loss"], first["grad_norm"]) == pytest.approx(
        by_formula(compare, teacher, list(range(4))), rel=2e-5
    )
    assert sum(each) / 2 == pytest.approx(first["loss"], rel=1e-6)


def test_the_matrix_of_attention_is_that_of_the_layer(teacher: LocalCheckpoint) -> None:
    """Which gives what the layer gives."""
    model = built(TEACHER, teacher)
    attention, sample = model.layers["2"].attention, PackedSamples()[4]
    positions = torch.from_numpy(sample.positions)[None]
    read = torch.randn(1, LENGTH, TEACHER.dim, dtype=torch.float64)
    mixing = attention_matrix(attention, read, positions)
    # the table of rotations is in float32
    assert largest_difference(mixing, softmax_matrix(attention, read, positions)) < 1e-7
    values = attention.qkv_linear(read)[2].repeat_interleave(TEACHER.n_heads // TEACHER.n_kv_heads, dim=2)
    given = attention.wo(torch.einsum("bhts,bshn->bthn", mixing, values).flatten(2))
    expected = attention(read, model.get_attention_masks(positions), positions)
    assert largest_difference(given, expected) < 1e-7


def test_only_mixers_are_trained_and_they_come_closer(
    whole: tuple[str, Path, Result], tmp_path: Path, teacher: LocalCheckpoint
) -> None:
    compare, _, result = whole
    (begun,) = run(tmp_path, spec_of(compare), teacher, stop_at=0)
    for name, weight in result.weights.items():
        changed = name.startswith(tuple(f"layers.{layer}.attention." for layer in LAYERS))
        unused = compare == "matrix" and name.endswith(
            ("conv_x", "z_proj.weight", "out_norm", "wo.weight", "wv.weight")
        )
        assert torch.equal(weight, begun.weights[name]) != (changed and not unused), name
    (longer,) = run(tmp_path / "longer", spec_of(compare, end_step=24), teacher)
    assert longer.rows[-1]["loss"] < 0.97 * longer.rows[0]["loss"]


def test_processes_and_interruptions_change_nothing(
    whole: tuple[str, Path, Result], tmp_path: Path, teacher: LocalCheckpoint
) -> None:
    compare, folder, result = whole
    (rest,) = run(tmp_path / "rest", spec_of(compare), teacher, source=at(folder, 2), begin_step=2)
    assert losses(rest) == losses(result)[2:] and same(rest.weights, result.weights)
    first, _ = run(tmp_path / "two", spec_of(compare, micro_batch_size=1), teacher, processes=2)
    assert losses(first) == pytest.approx(losses(result), rel=1e-5)
    assert first.rows[-1]["grad_norm"] == pytest.approx(result.rows[-1]["grad_norm"], rel=1e-4)
    assert first.heldout[4]["a"].nats == pytest.approx(result.heldout[4]["a"].nats, abs=1e-5)
