"""Low-rank adaptation: W + (alpha / rank) B A, checked against numpy, and what of it is trained, stored
and read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.model.lora import is_adapter, merge_adapter
from apertus_model.model.model import model_config
from apertus_model.trainer.checkpoint import CheckpointSource, load_tensors
from apertus_model.trainer.checkpoint_reader import CheckpointReader
from specs.launch import Parallel
from specs.settings import Lora
from tests.apertus_model.harness import (
    MODEL,
    ListedSamples,
    Result,
    SyntheticSamples,
    difference,
    full,
    losses,
    same,
    segment,
    train,
)
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.machine import slow

LORA = Lora(rank=3, alpha=6.0, targets=["wq", "wv", "wo", "up_proj", "down_proj"])
TARGETS = ("wq.weight", "wv.weight", "wo.weight", "up_proj.weight", "down_proj.weight")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent")
    train(folder, segment(end_step=3))
    return folder


def begin(parent: Path) -> CheckpointSource:
    return CheckpointSource(LocalCheckpoint(parent / "step-3"), 3, optimizer=False, new_adapters=True)


def go_on(folder: Path, step: int) -> CheckpointSource:
    return CheckpointSource(LocalCheckpoint(folder / f"step-{step}"), step, optimizer=True)


def adapted(**changes: Any) -> Any:
    return segment("sft", lora=LORA, **changes)


@pytest.fixture(scope="module")
def trained(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("adapted")
    return folder, train(folder, adapted(), source=begin(parent), begin_step=0, states=True)[0]


def plain_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """What a model without adapters reads."""
    state = dict(model_config(MODEL, sequence_length=16, attention="sdpa").build().state_dict())
    load_tensors(state, LocalCheckpoint(folder / f"step-{step}"))
    return state


def stored(folder: Path, step: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import load

    index = CheckpointReader(LocalCheckpoint(folder / f"step-{step}")).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
    load(state, storage_reader=CheckpointReader(LocalCheckpoint(folder / f"step-{step}")), no_dist=True)
    return state


def logits(weights: dict[str, torch.Tensor], lora: Lora | None) -> torch.Tensor:
    model = model_config(MODEL, sequence_length=16, attention="sdpa", lora=lora).build()
    model.load_state_dict(weights)
    sample = SyntheticSamples()[5]
    with torch.no_grad():
        return model(torch.from_numpy(sample.input)[None], torch.from_numpy(sample.positions)[None])


def test_new_adapters_change_nothing(parent: Path, tmp_path: Path) -> None:
    result = train(tmp_path, adapted(), source=begin(parent), begin_step=0, stop_at=0)[0]
    base = {name: weight for name, weight in result.weights.items() if not is_adapter(name)}
    assert same(base, plain_weights(parent, 3))
    assert torch.equal(logits(result.weights, LORA), logits(base, None))
    a = result.weights["layers.0.attention.qkv_linear.wq.lora_a.weight"]
    assert a.shape == (3, 32)
    assert a.std().item() == pytest.approx((3 * 32) ** -0.5, rel=0.3)
    assert not torch.equal(a, result.weights["layers.1.attention.qkv_linear.wq.lora_a.weight"])


def test_only_the_adapters_are_trained_and_have_optimizer_state(
    parent: Path, trained: tuple[Path, Result]
) -> None:
    _, result = trained
    base = {name: weight for name, weight in result.weights.items() if not is_adapter(name)}
    assert same(base, plain_weights(parent, 3))
    moved = [name for name in result.weights if name.endswith(("lora_a.weight", "lora_b.weight"))]
    assert len(moved) == 2 * len(TARGETS) * MODEL.n_layers
    assert all(result.weights[name].any() for name in moved)
    assert {name.removeprefix("state.").rsplit(".", 1)[0] for name in result.optimizer} == set(moved)


class FourSamples(ListedSamples):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % 4)


def test_adapters_learn_what_they_see_again(parent: Path, tmp_path: Path) -> None:
    seen = losses(
        train(tmp_path, adapted(end_step=12), source=begin(parent), begin_step=0, data=FourSamples)[0]
    )
    assert seen[-1] < seen[0] - 0.3


def test_readers_without_adapters_get_the_sum(trained: tuple[Path, Result]) -> None:
    folder, result = trained
    plain = plain_weights(folder, 6)
    for name, weight in plain.items():
        expected = result.weights[name].double().numpy()
        if name.endswith(TARGETS):
            stem = name.removesuffix("weight")
            a, b = (result.weights[f"{stem}{part}.weight"].double().numpy() for part in ("lora_a", "lora_b"))
            expected = expected + 6.0 / 3 * (b @ a)
            assert not np.array_equal(weight.numpy(), result.weights[name].numpy())
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(logits(plain, None), logits(result.weights, LORA), rtol=1e-5, atol=1e-5)


def test_the_checkpoint_holds_the_scale_that_it_was_trained_with(trained: tuple[Path, Result]) -> None:
    scales = {name: value for name, value in stored(trained[0], 6).items() if name.endswith("lora_scale")}
    assert len(scales) == len(TARGETS) * MODEL.n_layers
    assert {value.item() for value in scales.values()} == {2.0}


@pytest.mark.parametrize("processes", [slow(1), 2])
def test_resuming_with_adapters_gives_the_same_bits(parent: Path, tmp_path: Path, processes: int) -> None:
    begun, continued = begin(parent), go_on(tmp_path / "whole", 3)
    settings = {"processes": processes, "states": True}
    whole = train(tmp_path / "whole", adapted(), source=begun, begin_step=0, **settings)[0]
    rest = train(tmp_path / "rest", adapted(), source=continued, begin_step=3, **settings)[0]
    assert same(rest.weights, whole.weights)
    assert same(rest.optimizer, whole.optimizer)
    assert losses(rest) == losses(whole)[3:]


LAYOUTS = {
    "sharded": Parallel(),
    "context": Parallel(cp=2),
    "tensor": Parallel(tp=2),
    "sequence": Parallel(tp=2, sequence_parallel=True),
}


@pytest.mark.parametrize("layout", ["sharded", slow("context"), slow("tensor"), slow("sequence")])
def test_adapters_train_alike_on_every_layout(
    parent: Path, trained: tuple[Path, Result], tmp_path: Path, layout: str
) -> None:
    spec = adapted(parallel=LAYOUTS[layout], end_step=3)
    result = train(tmp_path, spec, processes=2, source=begin(parent), begin_step=0)[0]
    reference = trained[1].rows[:3]
    assert losses(result) == pytest.approx([row["loss"] for row in reference], abs=1e-5)
    assert [row["grad_norm"] for row in result.rows] == pytest.approx(
        [row["grad_norm"] for row in reference], rel=1e-4
    )


def test_recomputation_trains_the_same_adapters(
    parent: Path, trained: tuple[Path, Result], tmp_path: Path
) -> None:
    result = train(tmp_path, adapted(activation_checkpointing="full"), source=begin(parent), begin_step=0)[0]
    assert same(result.weights, trained[1].weights)


def test_a_child_begins_with_the_sum_and_with_new_adapters_if_any(
    trained: tuple[Path, Result], tmp_path: Path
) -> None:
    folder, _ = trained
    merged = plain_weights(folder, 6)
    source = CheckpointSource(LocalCheckpoint(folder / "step-6"), 6, optimizer=False, new_adapters=True)
    child = train(tmp_path / "plain", segment("qrpo"), source=source, begin_step=0, stop_at=0)[0]
    assert same(child.weights, merged)
    grandchild = train(tmp_path / "adapted", adapted(), source=source, begin_step=0, stop_at=0, processes=2)[
        0
    ]
    assert same({name: weight for name, weight in grandchild.weights.items() if not is_adapter(name)}, merged)
    assert not any(
        weight.any() for name, weight in grandchild.weights.items() if name.endswith("lora_b.weight")
    )


def test_a_merged_weight_is_the_same_for_every_division_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((7, 5), (3, 5), (7, 3)))
    scale = torch.tensor(0.7)
    whole = weight.clone()
    merge_adapter(whole, a, b, scale)
    for rows in (slice(0, 3), slice(3, 7)):
        part = weight[rows].clone()
        merge_adapter(part, a, b[rows], scale)
        assert torch.equal(part, whole[rows])
    np.testing.assert_allclose(
        whole.numpy(),
        weight.double().numpy() + scale.double().item() * (b.double() @ a.double()).numpy(),
        rtol=1e-7,
    )
    assert difference(full({"w": whole}), {"w": weight}) > 0.1
