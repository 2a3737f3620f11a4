"""Borders of documents, recomputation, compilation and the number of stages, in several layouts."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from apertus_model.model.attention_choice import Choice
from apertus_model.model.model import model_config
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.loader import collate
from specs.launch import Parallel
from tests.apertus_model.harness import (
    MODEL,
    Result,
    difference,
    losses,
    same,
    train,
)
from tests.apertus_model.trainer.layouts import (
    ALL,
    DEEP,
    INTERLEAVED,
    Differences,
    PackedSamples,
    assert_recomputation_changes_no_bit,
    run,
    spec_of,
)
from tests.machine import compiles, slow

# Documents, recomputation, compilation


@pytest.mark.parametrize(
    "parallel",
    [
        slow(Parallel(cp=2)),
        Parallel(cp=2, cp_load_balancer="head-tail"),
        Parallel(tp=2, sequence_parallel=True),
    ],
)
def test_changing_a_document_never_changes_the_logits_of_its_neighbours_on_other_ranks(
    tmp_path: Path, parallel: Parallel
) -> None:
    tokens = torch.randint(0, 128, (1, 32), generator=torch.Generator().manual_seed(0))
    borders = [0, 1, 7, 20, 30, 32]  # the border between the ranks lies inside of the third document
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(borders)])[None]

    def check_logits(trainer: Any) -> None:
        evaluator = Evaluator(trainer.model_parts[0], trainer.parallel_dims, trainer.device, batch_size=1)
        place = torch.arange(32)

        def logits(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # what stands where labels do is split like them
            row = SimpleNamespace(
                input=tokens[0].numpy(), positions=positions[0].numpy(), labels=place.numpy()
            )
            with torch.no_grad():
                made, places, _ = evaluator._of_labels([row], None)
            return (made.full_tensor() if hasattr(made, "full_tensor") else made), places

        before, places = logits(tokens)
        for begin, end in pairwise(borders):
            other = tokens.clone()
            other[:, begin:end] = (tokens[:, begin:end] + 1) % 128
            after, _ = logits(other)
            inside = (places >= begin) & (places < end)
            assert torch.equal(after[~inside], before[~inside])
            assert not inside.any() or not torch.equal(after[inside], before[inside])

    run(tmp_path, spec_of(parallel=parallel), 2, stop_at=0, inspect=check_logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CP", "CP head-tail", "TP with SP", "PP", "PP x CP"])
def test_flex_attention_sees_the_same_documents_in_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Forwards only, which is all that FlexAttention can do on a CPU, where a recipe cannot choose it."""
    samples = [PackedSamples(256)[index] for index in range(3)]
    model = model_config(DEEP, sequence_length=256, attention="sdpa", seed=7).build()
    model.init_weights()
    inputs, labels = collate(samples)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(
            model(inputs["input"], inputs["positions"]).flatten(0, 1), labels.flatten()
        ).item()
    attention = "torchtitan.models.common.attention"
    monkeypatch.setattr("apertus_model.trainer.config.attention_of", lambda segment: Choice("flex", ""))
    monkeypatch.setattr(f"{attention}.FlexAttention._compiled_flex_attn", staticmethod(flex_attention))
    monkeypatch.setattr(f"{attention}._compiled_create_block_mask", create_block_mask)

    def check_loss(trainer: Any) -> None:
        assert trainer.heldout_losses()["long"].nats == pytest.approx(expected, abs=2e-6)

    processes, parallel = ALL[name]
    spec = spec_of(parallel=parallel, sequence_length=256, global_batch_size=4)
    train(
        tmp_path,
        spec,
        processes=processes,
        data=PackedSamples,
        heldout={"long": samples},
        stop_at=0,
        inspect=check_loss,
    )


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("FSDP", "never"),
        pytest.param("HSDP", "never", marks=pytest.mark.slow),
        pytest.param("PP x FSDP", "always", marks=pytest.mark.slow),
    ],
)
def test_reshard_after_forward_changes_no_bit(tmp_path: Path, name: str, other: Any) -> None:
    processes, parallel = ALL[name]
    changed = parallel.model_copy(update={"reshard_after_forward": other})
    results = [
        run(tmp_path / str(index), spec_of(parallel=layout, end_step=2), processes, states=True)
        for index, layout in enumerate((parallel, changed))
    ]
    assert losses(results[1]) == losses(results[0])
    assert same(results[1].weights, results[0].weights)
    assert same(results[1].optimizer, results[0].optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [1, 2])  # as stages and more; fewer
def test_more_stages_in_a_process_train_alike(tmp_path: Path, micro_batch_size: int) -> None:
    deeper = MODEL.model_copy(update={"n_layers": 10})
    default, three = (
        run(
            tmp_path / str(stages),
            spec_of(
                model=deeper,
                end_step=2,
                micro_batch_size=micro_batch_size,
                parallel=Parallel(**INTERLEAVED, virtual_stages=stages),
            ),
            2,
            states=True,
        )
        for stages in (None, 3)
    )
    # Norms of the gradients are added up in another order, which changes the last bits of later weights.
    assert losses(three) == pytest.approx(losses(default), rel=1e-6)
    assert losses(three)[0] == losses(default)[0]
    assert difference(three.weights, default.weights) < 1e-6
    assert difference(three.optimizer, default.optimizer) < 1e-6


@pytest.mark.parametrize("kind", [slow("full"), "selective"])
@pytest.mark.parametrize(
    "name",
    [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("FSDP", "TP with SP", "CP", "PP"))],
)
def test_recomputation_changes_no_bit(tmp_path: Path, name: str | None, kind: str) -> None:
    processes, parallel = ALL[name] if name else (1, Parallel())
    spec = spec_of(parallel=parallel, end_step=2)
    assert_recomputation_changes_no_bit(tmp_path, spec, kind, processes)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "TP with SP"])
def test_a_memory_budget_recomputes_without_a_change_of_the_losses(
    tmp_path: Path, alone: tuple[Path, Result], name: str | None
) -> None:
    processes, parallel = ALL[name] if name else (1, Parallel())
    spec = spec_of(
        parallel=parallel, compile=True, activation_checkpointing="memory_budget", memory_budget=0.0
    )
    found = Differences.between(run(tmp_path, spec, processes), alone[1])
    assert found.loss < 2e-6, found
    assert found.weights < 1e-5, found


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recomputation"),
    [
        ("TP with SP", "none"),
        *((name, kind) for name in (None, "FSDP", "CP", "PP") for kind in ("none", "full")),
    ],
)
def test_compiled_layers_give_the_same_losses(
    tmp_path: Path,
    alone: tuple[Path, Result],
    name: str | None,
    recomputation: str,
) -> None:
    processes, parallel = ALL[name] if name else (1, Parallel())
    spec = spec_of(parallel=parallel, compile=True, activation_checkpointing=recomputation)
    found = Differences.between(run(tmp_path, spec, processes), alone[1])
    print(name, found)
    assert found.loss < 2e-6, found
    assert found.heldout < 2e-6, found
    assert found.weights < 1e-5, found
