"""Attention backends behind one interface: causal attention that never crosses a document border.

A backend is an inner-attention module `forward(q, k, v, *, attention_masks, scale, enable_gqa)` plus the mask
it wants, made once per forward pass from `positions` (`ApertusModel.get_attention_masks`). Positions restart
at 0 where a document begins; that is the only description of documents there is. A row may begin inside of a
document, at any position.

Shape suffixes: B batch, L local sequence, S whole sequence, N heads, H head dimension, T packed tokens (B *
L).

Invariant: all backends compute the same function; a backend that cannot run here is refused with the reason,
never replaced in silence.
"""

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.attention.flex_attention import _DEFAULT_SPARSE_BLOCK_SIZE
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module
from torchtitan.tools.utils import get_cuda_flash_attention_impl

from apertus_model.device import has_gpu

logger = logging.getLogger(__name__)

BACKENDS = ("sdpa", "flex", "varlen", "flash")


class AttentionBackendError(ValueError):
    """The requested attention backend cannot run in this process; the message says why and what can."""


class SdpaAttention(Module):
    """`torch.nn.functional.scaled_dot_product_attention` with a dense boolean document mask; runs
    everywhere."""

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
        """Attend within documents.

        Args:
            q_BLNH: queries (batch, local sequence, heads, head_dim).
            k_BLNH: keys, with as many heads or, with `enable_gqa`, a divisor of them.
            v_BLNH: values, shaped like the keys.
            attention_masks: bool (batch, 1, local sequence, whole sequence), True where a query may look.
            scale: softmax scale, 1/sqrt(head_dim) by default.
            enable_gqa: whether key heads are shared by groups of query heads.

        Returns:
            (batch, local sequence, heads, head_dim), dtype of the queries.
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
    """torch's variable-length attention. torchtitan demands FlashAttention 3 on Hopper and 4 on Blackwell;
    where they are not installed, the 2 that torch brings computes here."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        try:
            super().__init__(config)  # its last act is to activate the newer one
        except (ImportError, RuntimeError) as error:
            _say_once(f"varlen runs on FlashAttention 2, without {get_cuda_flash_attention_impl()}: {error}")


@cache
def _say_once(message: str) -> None:
    logger.info(message)


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
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend within documents; arguments as in `SdpaAttention.forward`, computed in bfloat16."""
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


# torch's own gather for context parallelism has two functional collectives in flight at a time, which now and
# then corrupts memory on gloo (torch 2.13). These are opaque operators, so that layers can be compiled around
# them.


@torch.library.custom_op("apertus::gather_sequence", mutates_args=())
def gather_sequence(local: torch.Tensor, group_name: str) -> torch.Tensor:
    """(batch, local sequence, ...) of every rank of a group, in order: (batch, whole sequence, ...).
    Differentiable, collective."""
    group = _resolve_process_group(group_name)
    slices = [torch.empty(local.shape, dtype=local.dtype, device=local.device) for _ in range(group.size())]
    dist.all_gather(slices, local.contiguous(), group=group)
    return torch.cat(slices, dim=1)


@torch.library.custom_op("apertus::sum_sequence", mutates_args=())
def sum_sequence(whole: torch.Tensor, group_name: str) -> torch.Tensor:
    """This rank's slice of the sum over a group of (batch, whole sequence, ...). Collective."""
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


gather_sequence.register_autograd(lambda ctx, grad: (sum_sequence(grad, ctx.group_name), None), setup_context=_remember_group)


def document_mask(positions: torch.Tensor, cp_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Causal mask that ends at document borders.

    Args:
        positions: (batch, local sequence) int64, 0 at the first token of each document.
        cp_mesh: the context-parallel mesh if the sequence is split over its ranks in order.

    Returns:
        bool (batch, 1, local sequence, whole sequence), True where the query (dim 2) may look at the key (dim
        3).
    """
    local_length = positions.shape[1]
    offset = 0
    whole = positions
    if cp_mesh is not None:
        slices = [torch.empty_like(positions) for _ in range(cp_mesh.size())]
        dist.all_gather(slices, positions.contiguous(), group=cp_mesh.get_group())
        whole = torch.cat(slices, dim=1)
        offset = cp_mesh.get_local_rank() * local_length
    document = (whole == 0).cumsum(dim=1)
    index = torch.arange(whole.shape[1], device=whole.device)
    local = slice(offset, offset + local_length)
    same_document = document[:, local, None] == document[:, None, :]
    causal = index[local, None] >= index[None, :]
    return (same_document & causal).unsqueeze(1)


def document_offsets(positions: torch.Tensor) -> VarlenMetadata:
    """Where documents begin in the packed tokens, for the variable-length kernels.

    torchtitan's own function drops what lies before the first 0 of the first row, and joins it to the row
    before in all others.

    Args:
        positions: (batch, seq_len) int64, 0 at the first token of each document.

    Returns:
        int32 offsets (documents + 1,) into T, from 0 to T, and the length of the longest document.
        Synchronises with the GPU.
    """
    begins = (begun_rows(positions) == 0).flatten().nonzero().flatten()
    offsets = torch.cat([begins, begins.new_tensor([positions.numel()])]).to(torch.int32)
    longest = int(offsets.diff().max())
    return VarlenMetadata(offsets, offsets, longest, longest)


def begun_rows(positions: torch.Tensor) -> torch.Tensor:
    """`positions` with a 0 at the head of every row: a document that began in an earlier row is one of its
    own here. torchtitan's block masks have no entry for tokens before the first 0."""
    return torch.cat([torch.zeros_like(positions[:, :1]), positions[:, 1:]], dim=1)


def resolve_backend(requested: str, *, param_dtype: str, context_parallel: int, sequence_length: int | None = None) -> str:
    """The backend to run: the requested one if it can run here, or the best one for `auto`, which is logged.

    Args:
        requested: one of `BACKENDS` or "auto".
        param_dtype: dtype of the forward pass, "bfloat16" or "float32".
        context_parallel: number of ranks that share one sequence.
        sequence_length: of every row, in tokens; None if rows differ.

    Raises:
        AttentionBackendError: the requested backend cannot run here.
    """
    setting = _Setting(param_dtype, context_parallel, sequence_length)
    if requested == "auto":
        chosen, reason = _best_backend(setting)
        logger.info("attention backend: %s (%s)", chosen, reason)
        return chosen
    obstacle = _obstacle(requested, setting)
    if obstacle is not None:
        runnable = [name for name in BACKENDS if _obstacle(name, setting) is None]
        raise AttentionBackendError(
            f"attention backend {requested!r} cannot run here: {obstacle}; what can: {', '.join(runnable)} (or auto)"
        )
    return requested


class _Setting(NamedTuple):
    """What decides which backends can run; see `resolve_backend`."""

    param_dtype: str
    context_parallel: int
    sequence_length: int | None

    @property
    def flex_obstacle(self) -> str | None:
        """Why a sequence cannot be split in blocks of FlexAttention."""
        multiple, length = _DEFAULT_SPARSE_BLOCK_SIZE * self.context_parallel, self.sequence_length
        if self.context_parallel == 1 or (length is not None and length % multiple == 0):
            return None
        rows = "rows differ in length" if length is None else f"sequences have {length}"
        return f"FlexAttention over {self.context_parallel} context-parallel ranks needs multiples of {multiple} tokens, and {rows}"


def _best_backend(setting: _Setting) -> tuple[str, str]:
    if not has_gpu():
        return "sdpa", "no GPU"
    if setting.context_parallel > 1:
        if (obstacle := setting.flex_obstacle) is not None:
            return "sdpa", obstacle
        return "flex", "context parallelism needs a block mask over the whole sequence"
    if setting.param_dtype != "bfloat16":
        return "flex", f"the variable-length kernels compute in bfloat16, this run in {setting.param_dtype}"
    return "varlen", "torch's variable-length flash attention, bfloat16"


def _obstacle(name: str, setting: _Setting) -> str | None:
    """Why a backend cannot run in this process, or None if it can."""
    if name not in BACKENDS:
        return f"there is no such backend (known: {', '.join(BACKENDS)})"
    if name == "sdpa":
        return None
    if not has_gpu():
        return "it needs a GPU (FlexAttention has no backward pass on CPU, the flash kernels no CPU code)"
    if name == "flex":
        return setting.flex_obstacle
    if setting.context_parallel > 1:
        return f"the variable-length kernels cannot split a sequence over {setting.context_parallel} context-parallel ranks"
    if setting.param_dtype != "bfloat16":
        return f"the variable-length kernels compute in bfloat16, this run in {setting.param_dtype}"
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "the optional package flash-attn is not installed (pip install apertus[flash])"
    return None


def inner_attention(backend: str) -> Module.Config:
    """Config of the inner-attention module of a resolved backend."""
    configs: dict[str, type[Module.Config]] = {
        "sdpa": SdpaAttention.Config,
        "flex": FlexAttention.Config,
        "varlen": TorchVarlenAttention.Config,
        "flash": FlashAttention.Config,
    }
    return configs[backend]()
