"""Attention backends behind one interface: causal attention that never crosses a document border.

A backend is an inner-attention module `forward(q, k, v, *, attention_masks, scale, enable_gqa)` plus the mask it wants,
made once per forward pass from `positions` by `document_mask` (`ApertusModel.get_attention_masks`). Positions restart at
0 where a document begins; that is the only description of documents there is.

Shape suffixes: B batch, L local sequence, S whole sequence, N heads, H head dimension, T packed tokens (B * L).

Invariant: all backends compute the same function; a backend that cannot run here is refused with the reason, never replaced
in silence.
"""

import importlib.util
import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from apertus_model.trainer.device import has_gpu

logger = logging.getLogger(__name__)

BACKENDS = ("sdpa", "flex", "varlen", "flash")


class AttentionBackendError(ValueError):
    """The requested attention backend cannot run in this process; the message says why and what can."""


class SdpaAttention(Module):
    """`torch.nn.functional.scaled_dot_product_attention` with a dense boolean document mask; runs everywhere."""

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
            k_BLNH, v_BLNH = _gather_keys(k_BLNH, v_BLNH, self.cp_mesh)
        out_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNLH.transpose(1, 2)


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


def _gather_keys(k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole sequence from the slices of all context-parallel ranks (differentiable)."""
    from torch.distributed.tensor.experimental._context_parallel._attention import flex_cp_allgather

    group_name = dist._get_process_group_name(mesh.get_group())
    return flex_cp_allgather(k_BLNH.contiguous(), v_BLNH.contiguous(), 1, group_name)


def document_mask(positions: torch.Tensor, cp_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Causal mask that ends at document borders.

    Args:
        positions: (batch, local sequence) int64, 0 at the first token of each document.
        cp_mesh: the context-parallel mesh if the sequence is split over its ranks in order.

    Returns:
        bool (batch, 1, local sequence, whole sequence), True where the query (dim 2) may look at the key (dim 3).
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


def resolve_backend(requested: str, *, param_dtype: str, context_parallel: int) -> str:
    """The backend to run: the requested one if it can run here, or the best one for `auto`, which is logged.

    Args:
        requested: one of `BACKENDS` or "auto".
        param_dtype: dtype of the forward pass, "bfloat16" or "float32".
        context_parallel: number of ranks that share one sequence.

    Raises:
        AttentionBackendError: the requested backend cannot run here.
    """
    if requested == "auto":
        chosen, reason = _best_backend(param_dtype=param_dtype, context_parallel=context_parallel)
        logger.info("attention backend: %s (%s)", chosen, reason)
        return chosen
    obstacle = _obstacle(requested, param_dtype=param_dtype, context_parallel=context_parallel)
    if obstacle is not None:
        runnable = [name for name in BACKENDS if _obstacle(name, param_dtype=param_dtype, context_parallel=context_parallel) is None]
        raise AttentionBackendError(
            f"attention backend {requested!r} cannot run here: {obstacle}; what can: {', '.join(runnable)} (or auto)"
        )
    return requested


def _best_backend(*, param_dtype: str, context_parallel: int) -> tuple[str, str]:
    if not has_gpu():
        return "sdpa", "no GPU"
    if context_parallel > 1:
        return "flex", "context parallelism needs a block mask over the whole sequence"
    if param_dtype != "bfloat16":
        return "flex", f"the variable-length kernels compute in bfloat16, this run in {param_dtype}"
    return "varlen", "torch's variable-length flash attention, bfloat16"


def _obstacle(name: str, *, param_dtype: str, context_parallel: int) -> str | None:
    """Why a backend cannot run in this process, or None if it can."""
    if name not in BACKENDS:
        return f"there is no such backend (known: {', '.join(BACKENDS)})"
    if name == "sdpa":
        return None
    if not has_gpu():
        return "it needs a GPU (FlexAttention has no backward pass on CPU, the flash kernels no CPU code)"
    if name == "flex":
        return None
    if context_parallel > 1:
        return f"the variable-length kernels cannot split a sequence over {context_parallel} context-parallel ranks"
    if param_dtype != "bfloat16":
        return f"the variable-length kernels compute in bfloat16, this run in {param_dtype}"
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "the optional package flash-attn is not installed (pip install apertus[flash])"
    return None


def inner_attention(backend: str) -> Module.Config:
    """Config of the inner-attention module of a resolved backend."""
    configs: dict[str, type[Module.Config]] = {
        "sdpa": SdpaAttention.Config,
        "flex": FlexAttention.Config,
        "varlen": VarlenAttention.Config,
        "flash": FlashAttention.Config,
    }
    return configs[backend]()
