"""Attention in which every head computes only a part of the pairs of queries and keys
(`specs.sparse_attention`).

In every head, a token belongs to a partition: the tokens of its document, or of its document and bucket. A
query sees the keys of its partition that are not later in the row and, with a window, not too far before it.
The queries that a head leaves out are a partition of their own, and so are the keys that it leaves out.

Two backends compute it. `MaskedAttention` makes a boolean mask of all pairs: the reference, of quadratic
cost. `ArrangedAttention` sorts the tokens of each head by partition, leaves out those that take no part, and
gives FlexAttention the blocks in which a query can see a key. These follow from the smallest and largest
partition and place of each block of tokens: no mask of all pairs is made. Without the sort, nearly every
block would have such a pair.

Shapes: B batch, T tokens of a row, N heads, K key heads, G query heads of a key head, H head dimension.

Invariants: both backends compute the same function. Buckets and sets have no gradient; they depend on seed,
layer and global head, never on the rank, the step or the pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import FlexAttention, GQAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.sharding import ShardingConfig

from apertus_model.model.attention import SdpaAttention, projected
from apertus_model.model.init import generator_of, local_part
from specs.capabilities import SPARSE_BLOCK
from specs.sparse_attention import Dropped, Hashed, SparseAttention, Windowed

LEFT_OUT = (-1, -2)
"""The partitions of the queries and of the keys that a head leaves out."""


class Tokens(NamedTuple):
    """The queries or the keys of every head, in some order."""

    partition: Tensor  # int64 (batch, heads, tokens)
    place: Tensor  # int64, place in the row; of the same shape, or one row and head for all
    left_out: int = 0  # number of tokens that each head leaves out, equal in all heads

    def ranges(self, size: int) -> tuple[Tensor, ...]:
        """Extremes of partition and of place in each block of `size` tokens: four (batch, heads, blocks)."""
        length = self.partition.shape[-1]
        blocks = -(-length // size)
        index = torch.arange(blocks * size, device=self.partition.device).clamp(max=length - 1)
        cut = [whole[..., index].unflatten(-1, (blocks, size)) for whole in (self.partition, self.place)]
        return tuple(extreme(-1) for block in cut for extreme in (block.amin, block.amax))

    def arranged(self) -> tuple[Tokens, Tensor, Tensor]:
        """The tokens that are not left out, sorted by partition and within it by place; the old index of each
        of them; and the new index of every token (-1: left out). Tokens must be in the row's order."""
        order = self.partition.argsort(dim=-1, stable=True)
        now = (order.argsort(dim=-1) - self.left_out).clamp(min=-1)
        order = order[..., self.left_out :]
        return Tokens(self.partition.gather(-1, order), order), order, now


class SeenPairs(NamedTuple):
    """The pairs of queries and keys in which the query sees the key."""

    queries: Tokens
    keys: Tokens
    window: int | None  # places that a query sees, its own included; None: all before it

    def pairs(self) -> Tensor:
        """bool (batch, query heads, queries, keys), True where a query sees a key."""
        partition, place = (of_query[..., :, None] for of_query in self.queries[:2])
        heads = self.queries.partition.shape[1]
        key_partition, key_place = (_of_query_heads(of_key, heads)[..., None, :] for of_key in self.keys[:2])
        seen = (partition == key_partition) & (place >= key_place)
        return seen if self.window is None else seen & (place - self.window < key_place)

    def blocks(self, size: int = SPARSE_BLOCK) -> Tensor:
        """bool (batch, query heads, blocks of queries, blocks of keys), True where a query may see a key."""
        low, high, first, last = (bound[..., :, None] for bound in self.queries.ranges(size))
        heads = self.queries.partition.shape[1]
        key_low, key_high, key_first, key_last = (
            _of_query_heads(bound, heads)[..., None, :] for bound in self.keys.ranges(size)
        )
        meet = (low <= key_high) & (high >= key_low) & (last >= key_first)
        return meet if self.window is None else meet & (first - self.window < key_last)

    def block_mask(self, size: int = SPARSE_BLOCK) -> BlockMask:
        """The mask for FlexAttention, which asks only for the pairs in the blocks of `blocks`."""
        partitions, places = self.queries.partition, self.queries.place
        key_partitions, key_places = self.keys.partition, self.keys.place
        group, window = partitions.shape[1] // key_partitions.shape[1], self.window

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place, key_place = places[b, h, query], key_places[b, h // group, key]
            seen = (partitions[b, h, query] == key_partitions[b, h // group, key]) & (place >= key_place)
            return seen if window is None else seen & (place - window < key_place)

        blocks = self.blocks(size)
        return BlockMask.from_kv_blocks(
            blocks.sum(-1, dtype=torch.int32),
            blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32),
            BLOCK_SIZE=size,
            mask_mod=sees,
            seq_lengths=(partitions.shape[-1], key_partitions.shape[-1]),
        )


def _of_query_heads(of_keys: Tensor, heads: int) -> Tensor:
    """(batch, key heads, ...) -> (batch, heads, ...); a single head, which stands for all, stays single."""
    return of_keys if of_keys.shape[1] == 1 else of_keys.repeat_interleave(heads // of_keys.shape[1], dim=1)


def select(
    method: SparseAttention, q_BTNH: Tensor, k_BTKH: Tensor, documents_BT: Tensor, draws: dict[str, Tensor]
) -> SeenPairs:
    """The pairs of a layer, in the order of the row. Queries and keys: after their norm, before RoPE.
    `documents_BT`: number of each token's document in its row, int64; `draws`: random numbers of these heads,
    as `draw` makes them."""
    length = q_BTNH.shape[1]
    place = torch.arange(length, device=q_BTNH.device)[None, None]
    documents, window, sides = documents_BT[:, None], None, []
    shares = (method.queries, method.keys) if isinstance(method, Dropped) else (0, 0)
    for vectors, name, share, left_out in zip(
        (q_BTNH, k_BTKH), ("query_draws", "key_draws"), shares, LEFT_OUT, strict=True
    ):
        number = int(share * length)
        match method:
            case Hashed():
                partition = bucket(vectors, draws["key_draws"]) * (length + 1) + documents
            case Dropped():
                first = draws[name][:, :length].argsort(dim=-1, stable=True).argsort(dim=-1) < number
                partition = torch.where(first, left_out, documents)
            case Windowed():
                partition, window = documents.expand(-1, vectors.shape[2], -1), method.window
        sides.append(Tokens(partition, place, number))
    return SeenPairs(sides[0], sides[1], window)


def bucket(x_BTNH: Tensor, directions_KHC: Tensor) -> Tensor:
    """The bucket of every vector: which of the C directions of its group of heads, or of their opposites, has
    the largest product with the vector; int64 (batch, heads, tokens), from 0 to 2 C - 1."""
    groups = x_BTNH.float().unflatten(2, (len(directions_KHC), -1))
    products = torch.einsum("btkgh,khc->bkgtc", groups, directions_KHC)
    return torch.cat([products, -products], dim=-1).argmax(dim=-1).flatten(1, 2)


def sizes(method: SparseAttention, config: GQAttention.Config) -> dict[str, tuple[int, ...]]:
    """Shapes of the random numbers of all heads of a layer, by name; heads first."""
    keys = config.n_kv_heads or config.n_heads
    match method:
        case Hashed():
            assert config.head_dim is not None
            return {"key_draws": (keys, config.head_dim, method.buckets // 2)}
        case Dropped():
            length = config.rope.max_seq_len
            return {"query_draws": (config.n_heads, length), "key_draws": (keys, length)}
        case Windowed():
            return {}


def draw(method: Hashed | Dropped, layer: int, name: str, size: tuple[int, ...]) -> Tensor:
    """The random numbers with one name, float32: for `hash`, directions of length 1; for `drop`, the numbers
    by which places are ordered, of which a longer row has more. Every head has a generator of its own."""
    heads = []
    for head in range(size[0]):
        numbers = torch.rand if isinstance(method, Dropped) else torch.randn
        heads.append(numbers(size[1:], generator=generator_of(method.seed, layer, name, head)))
    whole = torch.stack(heads)
    return F.normalize(whole, dim=1) if isinstance(method, Hashed) else whole


class ChoosingAttention(GQAttention):
    """Grouped-query attention that tells its inner attention which query sees which key. Takes the numbers of
    documents as its masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        method: SparseAttention
        layer: int  # number in the whole model

    _sharding_config: ShardingConfig | None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.method, self.layer = config.method, config.layer
        self.sizes = sizes(config.method, config)
        for name, size in self.sizes.items():
            self.register_buffer(name, torch.empty(size), persistent=False)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        for name, size in self.sizes.items():
            assert not isinstance(self.method, Windowed)
            drawn = draw(self.method, self.layer, name, size)
            setattr(self, name, drawn.to(buffer_device or getattr(self, name).device))

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Gives every tensor-parallel rank the random numbers of its own heads."""
        assert self._sharding_config is not None
        by_head = dict.fromkeys(self.sizes, dense_param_placement(tp=spmd.S(0)))
        self._sharding_config = dataclasses.replace(self._sharding_config, state_shardings=by_head)
        super().parallelize(parallel_dims)

    def forward(self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        """(batch, seq_len, dim) -> (batch, seq_len, dim). `attention_masks`: int64 (batch, seq_len), the
        number of each token's document."""
        q, k, v = projected(self, x_BLD)
        with torch.no_grad():
            draws = {name: local_part(getattr(self, name)) for name in self.sizes}
            selection = select(self.method, local_part(q), local_part(k), attention_masks, draws)
        q, k = self.rope(q, k, positions)
        out = self.inner_attention(
            q, k, v, attention_masks=selection, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        return self.wo(out.contiguous().flatten(2))


class MaskedAttention(SdpaAttention):
    """The reference: `scaled_dot_product_attention` with a boolean mask for every head, on any device."""

    @dataclass(kw_only=True, slots=True)
    class Config(SdpaAttention.Config):
        pass

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: SeenPairs, **options: Any
    ) -> Tensor:
        """Shapes and options as in `SdpaAttention.forward`."""
        return masked(q_BLNH, k_BLNH, v_BLNH, attention_masks.pairs(), super().forward, **options)


def masked(
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    pairs: Tensor,
    attend: Callable[..., Tensor],
    **more: Any,
) -> Tensor:
    """Attention by a mask, in which queries without a key give 0. Kernels differ in their results for these
    queries, so they see all keys, and their results are replaced."""
    alone = ~pairs.any(dim=-1, keepdim=True)
    out = attend(q_BLNH, k_BLNH, v_BLNH, attention_masks=pairs | alone, **more)
    return out.masked_fill(alone.transpose(1, 2), 0.0)


class ArrangedAttention(FlexAttention):
    """FlexAttention over the tokens of each head, sorted and without those that are left out."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: SeenPairs, **options: Any
    ) -> Tensor:
        """Shapes and options as in `SdpaAttention.forward`."""
        flex = super().forward

        def attend(q: Tensor, k: Tensor, v: Tensor, seen: SeenPairs) -> Any:
            return flex(q, k, v, attention_masks=seen.block_mask(), **options)

        return arranged(q_BLNH, k_BLNH, v_BLNH, attention_masks, attend)


def arranged(
    q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, seen: SeenPairs, attend: Callable[..., Tensor]
) -> Tensor:
    """Attention over the tokens of each head in the order of their partitions; the result in the order of the
    row, with 0 for queries that are left out. `attend` gets queries, keys and values in the order of their
    partitions, and the pairs among them."""
    queries, order, now = seen.queries.arranged()
    keys, key_order, key_now = seen.keys.arranged()
    k, v = (_Move.apply(whole, key_order, key_now) for whole in (k_BLNH, v_BLNH))
    out = attend(_Move.apply(q_BLNH, order, now), k, v, SeenPairs(queries, keys, seen.window))
    return _Move.apply(out, now, order)


class _Move(torch.autograd.Function):
    """Tokens (batch, tokens, heads, head_dim) in another order: each from the place `come_from` (batch,
    heads, new tokens), 0 for -1. `go_to` is the inverse of `come_from`, so the backward pass adds nothing up,
    and is deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, come_from: Tensor, go_to: Tensor) -> Tensor:
        ctx.save_for_backward(come_from, go_to)
        return _moved(x, come_from)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        _, go_to = ctx.saved_tensors
        return _moved(gradients[0], go_to), None, None


def _moved(x: Tensor, come_from: Tensor) -> Tensor:
    index = come_from.transpose(1, 2)[..., None]
    moved = x.gather(1, index.clamp(min=0).expand(-1, -1, -1, x.shape[-1]))
    return moved.masked_fill(index < 0, 0.0)


COMPUTED_BY: dict[type, type[MaskedAttention.Config] | type[ArrangedAttention.Config]] = {
    SdpaAttention.Config: MaskedAttention.Config,
    FlexAttention.Config: ArrangedAttention.Config,
}
"""The config of the sparse attention, whose layers make masks from the numbers of documents, by the config of
the chosen backend of causal attention."""


def choosing(plain: GQAttention.Config, method: SparseAttention, layer: int) -> ChoosingAttention.Config:
    """The config of a layer's attention, with the modules of `plain`."""
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    fields["inner_attention"] = COMPUTED_BY[type(plain.inner_attention)]()
    return ChoosingAttention.Config(**fields, method=method, layer=layer)
