"""Sparse attention against loops in float64, by both backends; its blocks against the pairs; its random
numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from apertus_model.model.attention import SdpaAttention, document_numbers
from apertus_model.model.model import model_config
from apertus_model.model.sparse_attention import (
    ArrangedAttention,
    MaskedAttention,
    SeenPairs,
    Tokens,
    arranged,
    draw,
    masked,
    select,
)
from specs.model import ModelSpec
from specs.sparse_attention import Dropped, Hashed, SparseAttention, Windowed
from tests.machine import compiles
from tests.numerics import Numerics

HEADS, KEY_HEADS, WIDTH, LENGTH = 4, 2, 16, 24
SCALE = 1 / math.sqrt(WIDTH)
METHODS: dict[str, SparseAttention] = {
    "hash": Hashed(sparse="hash", buckets=4),
    "drop": Dropped(sparse="drop", queries=0.3, keys=0.6, seed=1),
    "drop keys": Dropped(sparse="drop", queries=0, keys=0.5),
    "window": Windowed(sparse="window", window=3),
}
# the second row begins inside of a document
POSITIONS = torch.tensor(
    [[*range(1), *range(1), *range(13), *range(9)], [*range(5, 9), *range(19), *range(1)]]
)


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "compiled" not in request.node.name:
        name = "torchtitan.models.common.attention.FlexAttention._compiled_flex_attn"
        monkeypatch.setattr(name, staticmethod(flex_attention))


def model(method: SparseAttention | None, backend: str = "sdpa", **changes: Any) -> Any:
    spec = ModelSpec(
        dim=32, n_layers=2, n_heads=HEADS, n_kv_heads=KEY_HEADS, head_dim=WIDTH, ffn_dim=32, vocab_size=128,
        attention=method, **changes,
    )  # fmt: skip
    found = model_config(spec, sequence_length=LENGTH, attention=backend, seed=1).build()
    found.init_weights()
    return found


def inputs(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, LENGTH, n, WIDTH, generator=generator) for n in (HEADS, KEY_HEADS, KEY_HEADS)]


def draws_of(method: SparseAttention, layer: int = 0) -> dict[str, torch.Tensor]:
    attention = model(method).layers[str(layer)].attention
    return {name: getattr(attention, name) for name in attention.sizes}


def selection(method: SparseAttention, q: torch.Tensor, k: torch.Tensor) -> SeenPairs:
    return select(method, q, k, document_numbers(POSITIONS), draws_of(method))


def seen_keys(method: SparseAttention, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """What a query sees, by loops over places: bool (batch, heads, queries, keys)."""
    draws = {name: one.double().numpy() for name, one in draws_of(method).items()}
    document = (POSITIONS == 0).cumsum(1)
    found = np.zeros((2, HEADS, LENGTH, LENGTH), bool)

    def bucket(vector: np.ndarray, directions: np.ndarray) -> int:
        products = vector @ directions
        return int(np.argmax([*products, *-products]))

    def dropped(name: str, head: int, share: float) -> set[int]:
        return set(np.argsort(draws[name][head, :LENGTH])[: math.floor(share * LENGTH)])

    for b, n, i, j in np.ndindex(*found.shape):
        group = n * KEY_HEADS // HEADS
        sees = j <= i and document[b, i] == document[b, j]
        if isinstance(method, Hashed):
            directions = draws["key_draws"][group]
            sees = sees and bucket(q[b, i, n], directions) == bucket(k[b, j, group], directions)
        elif isinstance(method, Dropped):
            sees = sees and i not in dropped("query_draws", n, method.queries)
            sees = sees and j not in dropped("key_draws", group, method.keys)
        else:
            sees = sees and i - j < method.window
        found[b, n, i, j] = sees
    return found


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """softmax(q k / sqrt(width)) v over the keys that a query sees, 0 without any; loops in float64."""
    out = np.zeros_like(q)
    for b, n, i in np.ndindex(2, HEADS, LENGTH):
        keys = np.flatnonzero(seen[b, n, i])
        if len(keys):
            group = n * KEY_HEADS // HEADS
            weights = np.exp(SCALE * (k[b, keys, group] @ q[b, i, n]))
            out[b, i, n] = weights @ v[b, keys, group] / weights.sum()
    return out


def by_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: SeenPairs) -> torch.Tensor:
    inner = ArrangedAttention.Config().build()
    return inner(q, k, v, attention_masks=chosen, scale=SCALE, enable_gqa=True)


def by_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: SeenPairs) -> torch.Tensor:
    inner = MaskedAttention.Config().build()
    return inner(q, k, v, attention_masks=chosen, scale=SCALE, enable_gqa=True)


def by_sorted_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: SeenPairs) -> torch.Tensor:
    """The tokens in the order of `ArrangedAttention`, computed by the kernel that has a backward pass
    here."""
    inner = SdpaAttention.Config().build()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, found: SeenPairs) -> torch.Tensor:
        return masked(q, k, v, found.pairs(), inner, scale=SCALE, enable_gqa=True)

    return arranged(q, k, v, chosen, attend)


WAYS = {"flex over sorted tokens": by_flex, "mask": by_mask, "mask of sorted tokens": by_sorted_mask}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", METHODS)
def test_it_is_the_softmax_over_the_keys_that_are_seen(name: str, way: str, numerics: Numerics) -> None:
    method, (q, k, v) = METHODS[name], inputs()
    with torch.no_grad():
        found = WAYS[way](q, k, v, selection(method, q, k)).double().numpy()
    arrays = [one.double().numpy() for one in (q, k, v)]
    seen = seen_keys(method, *arrays[:2])
    alone = ~seen.any(-1)
    assert alone.any() == (name != "window") and 0 < seen.sum() < (seen | ~seen).sum() / 4
    assert not found.transpose(0, 2, 1, 3)[alone].any(), "queries without a key"
    numerics(
        "model",
        "sparse attention",
        source="softmax(s q k) v over the keys that a head chooses",
        against="loops in float64",
        difference=float(np.abs(found - reference(*arrays, seen)).max()),
        allowed=2e-6,
    )


@pytest.mark.parametrize("way", ["mask", "mask of sorted tokens"])
@pytest.mark.parametrize("name", METHODS)
def test_its_gradient_is_that_of_the_formula(name: str, way: str, numerics: Numerics) -> None:
    method, tensors = METHODS[name], [one.requires_grad_() for one in inputs()]
    weights = torch.randn(2, LENGTH, HEADS, WIDTH, generator=torch.Generator().manual_seed(5))
    chosen = selection(method, *tensors[:2])
    (WAYS[way](*tensors, chosen) * weights).sum().backward()
    q, k, v = (one.detach().double().requires_grad_() for one in tensors)
    seen = torch.from_numpy(seen_keys(method, q.detach().numpy(), k.detach().numpy()))
    scores = SCALE * torch.einsum("bikgh,bjkh->bkgij", q.unflatten(2, (KEY_HEADS, -1)), k).flatten(1, 2)
    exponents = scores.exp() * seen
    shares = exponents / exponents.sum(-1, keepdim=True).clamp(min=1e-300)
    out = torch.einsum("bkgij,bjkh->bikgh", shares.unflatten(1, (KEY_HEADS, -1)), v).flatten(2, 3)
    (out * weights).sum().backward()
    for one, expected in zip(tensors, (q, k, v), strict=True):
        assert one.grad is not None and expected.grad is not None and one.grad.isfinite().all()
        numerics(
            "model",
            "gradient of sparse attention",
            source="softmax(s q k) v over the keys that a head chooses",
            against="autograd through the formula in float64",
            difference=float((one.grad.double() - expected.grad).abs().max()),
            allowed=5e-6,
        )


@compiles
@pytest.mark.slow
def test_the_compiled_flex_kernel_reads_no_other_blocks_and_computes_the_same() -> None:
    """The kernel, unlike the eager form, asks for the pairs of the given blocks alone."""
    length = 300
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, length, n, WIDTH, generator=generator) for n in (HEADS, KEY_HEADS, KEY_HEADS))
    documents = (torch.arange(length) % 170 == 0).cumsum(0)[None]
    for method in METHODS.values():
        torch.compiler.reset()  # torch 2.13 makes wrong C++ of shapes that vary
        draws = draws_of(method)
        if isinstance(method, Dropped):
            draws = {name: draw(method, 0, name, (len(one), length)) for name, one in draws.items()}
        chosen = select(method, q, k, documents, draws)
        with torch.no_grad():
            torch.testing.assert_close(by_flex(q, k, v, chosen), by_mask(q, k, v, chosen), atol=2e-6, rtol=0)


def long(method: SparseAttention, length: int = 1000) -> SeenPairs:
    """Of random content in two documents, in rows that are no multiple of the blocks."""
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, length, heads, WIDTH, generator=generator) for heads in (HEADS, KEY_HEADS))
    draws = {name: draw(method, 0, name, (HEADS if "query" in name else KEY_HEADS, length))
             for name in ("query_draws", "key_draws") if isinstance(method, Dropped)}  # fmt: skip
    documents = (torch.arange(length) >= 777).long().expand(2, length)
    return select(method, q, k, documents, draws or draws_of(method))


def moved(chosen: SeenPairs) -> SeenPairs:
    return SeenPairs(chosen.queries.arranged()[0], chosen.keys.arranged()[0], chosen.window)


@pytest.mark.parametrize("name", METHODS)
def test_the_blocks_contain_every_pair(name: str) -> None:
    size, found = 32, moved(long(METHODS[name]))
    pairs = found.pairs()
    rows, columns = (-side % size for side in pairs.shape[-2:])
    padded = torch.nn.functional.pad(pairs, (0, columns, 0, rows))
    needed = padded.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).any(-1).any(-2)
    blocks = found.blocks(size)
    assert not (needed & ~blocks).any() and needed.sum() > 0.8 * blocks.sum()
    mask = found.block_mask(size)
    assert torch.equal(mask.to_dense().bool(), blocks)


def computed_share(selection: SeenPairs, size: int) -> float:
    """Blocks that FlexAttention computes, as a share of those of causal attention over whole rows."""
    queries = selection.queries
    count = -(-(queries.partition.shape[-1] + queries.left_out) // size)
    blocks = selection.blocks(size)
    return int(blocks.sum()) / (blocks.shape[0] * blocks.shape[1] * count * (count + 1) // 2)


def test_sorting_leaves_one_block_per_bucket_of_the_causal_ones() -> None:
    for buckets in (4, 8):
        method = Hashed(sparse="hash", buckets=buckets)
        generator = torch.Generator().manual_seed(2)
        q, k = (torch.randn(1, 4096, heads, WIDTH, generator=generator) for heads in (HEADS, KEY_HEADS))
        chosen = select(method, q, k, torch.zeros(1, 4096, dtype=torch.int64), draws_of(method))
        # blocks at the borders of buckets reach into two of them
        assert 1 / buckets < computed_share(moved(chosen), 32) < 1.5 / buckets
        assert computed_share(chosen, 32) > 0.99


def test_the_share_of_pairs_is_what_a_plan_counts() -> None:
    length = 512
    causal = length * (length + 1) / 2
    q, k = torch.zeros(1, length, HEADS, WIDTH), torch.zeros(1, length, KEY_HEADS, WIDTH)
    documents = torch.zeros(1, length, dtype=torch.int64)
    method: SparseAttention = Windowed(sparse="window", window=40)
    found = select(method, q, k, documents, {}).pairs().sum() / HEADS / causal
    assert found == pytest.approx(method.share(length), rel=1e-6)
    method = Dropped(sparse="drop", queries=0.5, keys=0.25)
    draws = {"query_draws": draw(method, 0, "query_draws", (HEADS, length)),
             "key_draws": draw(method, 0, "key_draws", (KEY_HEADS, length))}  # fmt: skip
    found = select(method, q, k, documents, draws).pairs().sum() / HEADS / causal
    assert found == pytest.approx(method.share(length), rel=0.05)


def test_random_numbers_follow_from_seed_layer_and_global_head() -> None:
    method = Hashed(sparse="hash", buckets=6, seed=3)
    found = draw(method, 5, "key_draws", (8, WIDTH, 3))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(8, 3))
    assert torch.equal(draw(method, 5, "key_draws", (4, WIDTH, 3)), found[:4]), "of however many heads"
    drop = METHODS["drop"]
    assert torch.equal(draw(drop, 0, "key_draws", (2, 99))[:, :60], draw(drop, 0, "key_draws", (2, 60)))
    others = [
        draw(method, 6, "key_draws", (8, WIDTH, 3)),
        draw(method.model_copy(update={"seed": 4}), 5, "key_draws", (8, WIDTH, 3)),
        found.roll(1, 0),
    ]
    assert all((found != other).any(dim=(1, 2)).all() for other in others)


@pytest.mark.parametrize("name", METHODS)
def test_a_model_depends_on_no_other_random_numbers(name: str) -> None:
    tokens = torch.randint(128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        one = model(METHODS[name])
        with torch.no_grad():
            found += [one(tokens, POSITIONS), one.eval()(tokens, POSITIONS)]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not torch.equal(found[0], model(None)(tokens, POSITIONS))


@pytest.mark.parametrize("name", METHODS)
def test_a_later_token_or_another_document_changes_nothing(name: str) -> None:
    one, tokens = model(METHODS[name]), torch.zeros(2, LENGTH, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 10], changed[1, 22] = 7, 9
    with torch.no_grad():
        differs = (one(tokens, POSITIONS) != one(changed, POSITIONS)).any(-1)
    assert not differs[0, :10].any() and not differs[0, 15:].any() and differs[0, 10]
    assert not differs[1, :22].any() and not differs[1, 23:].any()


def test_the_plain_model_has_the_attention_of_before() -> None:
    plain = model(None)
    assert all(type(layer.attention).__name__ == "GQAttention" for layer in plain.layers.values())
    assert all(type(layer.attention.inner_attention) is SdpaAttention for layer in plain.layers.values())
    sparse = model(METHODS["hash"])
    assert dict(sparse.state_dict()).keys() == dict(plain.state_dict()).keys(), "nothing is stored"


def test_tokens_of_no_room_come_back_as_zeros() -> None:
    partition = torch.tensor([[[1, -1, 0, 0, -1, 1]]])
    tokens = Tokens(partition, torch.arange(6)[None, None], left_out=2)
    found, order, now = tokens.arranged()
    assert found.partition.tolist() == [[[0, 0, 1, 1]]] and order.tolist() == [[[2, 3, 0, 5]]]
    assert now.tolist() == [[[2, -1, 0, 1, -1, 3]]]
