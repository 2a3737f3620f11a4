"""What a layer keeps, counted by hand. tests/apertus_model/trainer/test_memory_model.py compares it with the
engine."""

from __future__ import annotations

import pytest

from specs.launch import Parallel
from specs.layer_schedule import Repeats
from tests.flows.planning.estimate.test_memory_formula import MODEL, TOKENS, memory


@pytest.mark.parametrize(("split", "sums"), [(False, 0), (True, 2)])
def test_selective_recomputation_keeps_the_sums_over_ranks_that_share_the_sequence(
    split: bool, sums: int
) -> None:
    """Beside the layer's input, queries, values, the upper half of the feed-forward, and what attention
    gives."""
    model = MODEL.model_copy(update={"vocab_size": 262_144})
    parallel = Parallel(tp=2, sequence_parallel=split)
    found = memory(2, parallel, model=model, activation_checkpointing="selective")
    state = 256 / (2 if split else 1)
    bytes_of_token = 2 * (1 + sums) * state + (2 * (256 + 64 + 1344) + 2 * 256 + 4 * 8) / 2
    assert found.moment == "loss"
    final = 2 * (state + 256)  # the last norm's input and result
    assert found.activations == pytest.approx(TOKENS * (6 * bytes_of_token + final))


@pytest.mark.parametrize(
    ("again", "more"),
    [
        ("none", 2 * 1344),  # the gate, before and after SiLU
        ("selective", 256),  # every second of seven products: the last is the result
        ("full", 0),
    ],
)
def test_swiglu_keeps_its_gate_and_as_many_products_as_it_has(again: str, more: int) -> None:
    models = [
        MODEL.model_copy(update={"activation": activation, "vocab_size": 65_536})
        for activation in ("xielu", "swiglu")
    ]
    plain, found = (
        memory(1, Parallel(), model=model, activation_checkpointing=again, micro_batch_size=4)
        for model in models
    )
    assert plain.moment == found.moment == "loss"
    assert found.activations - plain.activations == 6 * 4 * TOKENS * 2 * more


def test_attention_without_a_kernel_keeps_softmax_keys_and_values_of_every_head() -> None:
    """Keys of earlier steps need a mask, which no kernel of a GPU takes where heads share keys. Twice a layer
    with two passes, whose second sees 1,024 keys: three times the keys and the scores of one pass."""
    own, all_passes = (
        memory(
            1,
            Parallel(),
            model=MODEL.model_copy(update={"repeats": Repeats(start=4, layers=1, times=2, keys=keys)}),
        )
        for keys in ("own", "all")
    )
    assert own.moment == all_passes.moment == "loss"
    runs, seen, kept = 7, 8, 2 * 64  # runs of layers, passes that they see, keys and values of a run
    heads = 2 * 8 * TOKENS
    more = seen * (2 * 2 * 256 + heads) - runs * 2 * kept
    assert all_passes.activations - own.activations == TOKENS * more
