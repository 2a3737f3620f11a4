"""Attention backends behind one interface: causal attention that never crosses a document border.

A backend is an inner-attention module `forward(q, k, v, *, attention_masks, scale, enable_gqa)` and the kind
of mask that it needs. `ApertusModel.get_attention_masks` makes the mask once per forward pass from
`positions`, which restart at 0 where a document begins; nothing else describes the documents. A row may begin
in the middle of a document, at any position.

Shape suffixes: B batch, L local sequence, S whole sequence, N heads, H head dimension, T packed tokens (B *
L).

Invariant: all backends compute the same function. `attention_choice` says which one runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from apertus_model.collectives import gathered


class SdpaAttention(Module):
    """torch's `scaled_dot_product_attention` with a dense boolean document mask. Runs on any device."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.cp_mesh: DeviceMesh | None = None

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Computes attention within documents, in the shape and dtype of the queries.

        Args:
            q_BLNH: queries (batch, local sequence, heads, head_dim).
            k_BLNH, v_BLNH: keys and values, with as many heads or, with `enable_gqa`, a divisor of them.
            attention_masks: bool (batch, 1, local sequence, whole sequence), True where a query attends.
            scale: softmax scale, 1/sqrt(head_dim) by default.
            enable_gqa: whether key heads are shared by groups of query heads.
        """
        if self.cp_mesh is not None:
            group_name = self.cp_mesh.get_group().group_name
            k_BLNH, v_BLNH = gather_sequence(k_BLNH, group_name), gather_sequence(v_BLNH, group_name)
        out_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNLH.transpose(1, 2)


class TorchVarlenAttention(VarlenAttention):
    """torch's variable-length attention, computed by the FlashAttention that `resolve_backend` has activated.
    The constructor of torchtitan 0.3.0's class activates one itself, and fails if there is none."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.window_size = config.window_size


class FlashAttention(Module):
    """The `flash-attn` package's variable-length kernel (optional extra, GPU only)."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Computes attention within documents, in bfloat16; arguments as in `SdpaAttention.forward`."""
        from flash_attn import flash_attn_varlen_func

        out_TNH = flash_attn_varlen_func(
            *(t_BLNH.flatten(0, 1).to(torch.bfloat16) for t_BLNH in (q_BLNH, k_BLNH, v_BLNH)),
            cu_seqlens_q=attention_masks.cu_seq_q,
            cu_seqlens_k=attention_masks.cu_seq_k,
            max_seqlen_q=attention_masks.max_q,
            max_seqlen_k=attention_masks.max_k,
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return out_TNH.view(q_BLNH.shape).to(q_BLNH.dtype)


def projected(attention: GQAttention, x_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, normed but not rotated, and values: (batch, seq_len, heads, head_dim) each."""
    queries, keys, values = attention.qkv_linear(x_BLD)
    if attention.q_norm is not None and attention.k_norm is not None:
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    return queries, keys, values


KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Keys after norm and rotation, and values, of a step of a layer schedule: (batch, seq_len, key heads,
head_dim) each."""


class EarlierKeysAttention(GQAttention):
    """Attention that also sees keys and values of earlier steps of a layer schedule. Needs the dense mask of
    `SdpaAttention`, which is the same for the keys of every step: a token has the same place in each."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(
        self,
        x_BLD: torch.Tensor,
        attention_masks: torch.Tensor,
        positions: torch.Tensor | None = None,
        *,
        earlier: Sequence[KeysValues] | None = None,
    ) -> Any:
        """(batch, seq_len, dim), the same shape; with `earlier`, also the layer's own keys and values."""
        if earlier is None:
            return super().forward(x_BLD, attention_masks, positions)
        queries, own_keys, own_values = projected(self, x_BLD)
        queries, own_keys = self.rope(queries, own_keys, positions)
        keys, values = zip(*earlier, (own_keys, own_values), strict=True)
        attended = self.inner_attention(
            queries,
            torch.cat(keys, dim=1),
            torch.cat(values, dim=1),
            attention_masks=attention_masks.repeat(1, 1, 1, len(keys)),
            scale=self.scaling,
            enable_gqa=self.enable_gqa,
        )
        return self.wo(attended.contiguous().flatten(2)), (own_keys, own_values)


# torch's own gather for context parallelism runs two functional collectives at a time, which sometimes
# corrupts memory on gloo (torch 2.13). The operators below run one, and are opaque to the compiler, so that
# layers can be compiled around them.


@torch.library.custom_op("apertus::gather_sequence", mutates_args=())
def gather_sequence(local: torch.Tensor, group_name: str) -> torch.Tensor:
    """Joins the slices of all ranks of a group in order: (batch, local sequence, ...) -> (batch, whole
    sequence, ...). Differentiable, collective."""
    return gathered(local, _resolve_process_group(group_name), dim=1)


@torch.library.custom_op("apertus::sum_sequence", mutates_args=())
def sum_sequence(whole: torch.Tensor, group_name: str) -> torch.Tensor:
    """This rank's slice of the sum of (batch, whole sequence, ...) over the ranks of a group. Collective."""
    group = _resolve_process_group(group_name)
    slices = whole.chunk(group.size(), dim=1)
    own = torch.empty(slices[0].shape, dtype=whole.dtype, device=whole.device)
    dist.reduce_scatter_tensor(own, torch.cat(slices), group=group)
    return own


@gather_sequence.register_fake
def _(local: torch.Tensor, group_name: str) -> torch.Tensor:
    batch, length, *rest = local.shape
    return local.new_empty(batch, length * _resolve_process_group(group_name).size(), *rest)


@sum_sequence.register_fake
def _(whole: torch.Tensor, group_name: str) -> torch.Tensor:
    batch, length, *rest = whole.shape
    return whole.new_empty(batch, length // _resolve_process_group(group_name).size(), *rest)


def _remember_group(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group_name = inputs[1]


gather_sequence.register_autograd(
    lambda ctx, grad: (sum_sequence(grad, ctx.group_name), None), setup_context=_remember_group
)


def document_mask(
    positions: torch.Tensor, cp_mesh: DeviceMesh | None = None, load_balancer: str | None = None
) -> torch.Tensor:
    """Causal mask that ends at document borders: bool (batch, 1, local sequence, whole sequence), True where
    the query (dim 2) attends to the key (dim 3). Keys are in the order in which `gather_sequence` joins them.

    Args:
        positions: (batch, local sequence) int64, 0 at the first token of each document.
        cp_mesh: the context-parallel mesh if the sequence is split over its ranks.
        load_balancer: how the sequence is split, see `gathered_order`.
    """
    local_length = positions.shape[1]
    offset, ranks = 0, 1
    if cp_mesh is not None:
        ranks = cp_mesh.size()
        positions = gathered(positions, cp_mesh.get_group(), dim=1)
        offset = cp_mesh.get_local_rank() * local_length
    index = gathered_order(positions.shape[1], ranks, load_balancer, positions.device)
    document = (positions[:, index.argsort()] == 0).cumsum(dim=1)[:, index]
    local = slice(offset, offset + local_length)
    same_document = document[:, local, None] == document[:, None, :]
    causal = index[local, None] >= index[None, :]
    return (same_document & causal).unsqueeze(1)


def gathered_order(
    length: int, ranks: int, load_balancer: str | None, device: torch.device | None = None
) -> torch.Tensor:
    """The places, int64, in a sequence of `length` tokens of the tokens of all context-parallel ranks, one
    rank after the other. With the load balancer `headtail`, rank r of n has pieces r and 2 n - 1 - r of 2 n;
    without one, piece r of n."""
    places = torch.arange(length, device=device)
    if load_balancer is None:
        return places
    pieces = places.chunk(2 * ranks)
    return torch.cat([pieces[piece] for rank in range(ranks) for piece in (rank, 2 * ranks - 1 - rank)])


def document_offsets(positions: torch.Tensor, device: torch.device | None = None) -> VarlenMetadata:
    """The offsets at which documents begin in the packed tokens, for the variable-length kernels: int32
    (documents + 1,) into T, from 0 to T, and the length of the longest document.

    torchtitan 0.3.0's own function drops the tokens before the first 0 of the first row. In every other row
    it adds them to the last document of the row before.

    Args:
        positions: (batch, seq_len) int64, 0 at the first token of each document. If they are on a GPU, this
            function waits for it.
        device: of the offsets, by default that of the positions.
    """
    begins = (begun_rows(positions) == 0).flatten().nonzero().flatten()
    offsets = torch.cat([begins, begins.new_tensor([positions.numel()])]).to(torch.int32)
    longest = int(offsets.diff().max())
    offsets = offsets.to(device, non_blocking=True)
    return VarlenMetadata(offsets, offsets, longest, longest)


def document_numbers(positions: torch.Tensor) -> torch.Tensor:
    """The number of each token's document in its row, int64 of the shape of `positions`."""
    return (positions == 0).cumsum(dim=1)


def begun_rows(positions: torch.Tensor) -> torch.Tensor:
    """`positions` with a 0 at the head of every row, so that the rest of a document from an earlier row
    counts as a document. torchtitan's block masks have no entry for tokens before the first 0."""
    return torch.cat([torch.zeros_like(positions[:, :1]), positions[:, 1:]], dim=1)


def inner_attention(backend: str) -> Module.Config:
    """Config of the inner-attention module of a backend."""
    configs: dict[str, type[Module.Config]] = {
        "sdpa": SdpaAttention.Config,
        "flex": FlexAttention.Config,
        "varlen": TorchVarlenAttention.Config,
        "flash": FlashAttention.Config,
    }
    return configs[backend]()
