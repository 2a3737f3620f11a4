"""Distributes a model over processes: tensor and context parallelism, activation checkpointing, compile,
FSDP2.

Tensor parallelism is declared module by module (`set_sharding`): column-parallel into attention and
feed-forward, row-parallel out of them; norms and the xIELU scalars are replicated. It describes all layouts:
torchtitan leaves out the axes that a run does not have.

Invariant: gradients are summed, never averaged; the loss is already divided by the global number of trained
tokens.
"""

from dataclasses import replace
from typing import Any

import spmd_types as spmd
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    rowwise_config,
    set_decoder_sharding_config,
    set_gqa_attention_sharding,
    set_gqa_inner_attention_local_map,
)
from torchtitan.protocols.model_spec import ModelSpec as TitanModelSpec
from torchtitan.protocols.sharding import ShardingConfig

from apertus_model.model.attention import SdpaAttention


def set_sharding(config: Any, *, sequence_parallel: bool) -> None:
    """Fill `sharding_config` of every sub-config of an `ApertusModel.Config`, in place."""
    set_decoder_sharding_config(config, enable_sp=sequence_parallel)
    head = replace(config.lm_head.sharding_config, out_src_shardings=None, out_dst_shardings=None)
    config.lm_head.sharding_config = head  # `OutputLayer` splits and sums what it returns
    block_input = dense_sequence_parallel_placement() if sequence_parallel else dense_activation_placement(tp=spmd.I)
    heads = dense_activation_placement(tp=spmd.S(2))
    replicated = dense_param_placement(tp=spmd.R)
    for layer in config.layers:
        layer.attention_norm.sharding_config = norm_config(enable_sp=sequence_parallel)
        layer.ffn_norm.sharding_config = norm_config(enable_sp=sequence_parallel)
        set_gqa_attention_sharding(layer.attention, enable_sp=sequence_parallel)
        set_gqa_inner_attention_local_map(layer.attention.inner_attention)
        layer.attention.qk_norm.sharding_config = ShardingConfig(
            state_shardings={"weight": replicated},
            in_src_shardings={"input": heads},
            in_dst_shardings={"input": heads},
            out_src_shardings=heads,
            out_dst_shardings=heads,
        )
        feed_forward = layer.feed_forward
        feed_forward.sharding_config = ShardingConfig(
            in_src_shardings={"x": block_input},
            in_dst_shardings={"x": dense_activation_placement(tp=spmd.R)},
        )
        feed_forward.up_proj.sharding_config = colwise_config()
        if hasattr(feed_forward, "gate_proj"):
            feed_forward.gate_proj.sharding_config = colwise_config()
        else:
            feed_forward.act.sharding_config = ShardingConfig(state_shardings={"alpha_p": replicated, "alpha_n": replicated})
        feed_forward.down_proj.sharding_config = rowwise_config(output_sp=sequence_parallel)


def parallelize(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: Any,
    dump_folder: str,
) -> Decoder:
    """Apply a layout to a model, or a stage of a pipeline, on the meta device, in place. Called by
    torchtitan, whose arguments these are.

    Raises:
        ValueError: a torchtitan backend other than `partial_dtensor`, with the reason.
    """
    refuse_unsupported(parallelism)
    if parallel_dims.cp_enabled:
        _share_sequences(model, parallel_dims)
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh(axes),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
    )
    if torch.distributed.get_backend() == "gloo":
        _sum_gradients_plainly(model)
    return model


def refuse_unsupported(parallelism: ParallelismConfig) -> None:
    """ValueError for a layout that torchtitan 0.3.0 offers and this engine does not run, with the reason."""
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"torchtitan's backend {parallelism.spmd_backend!r} fails on more than one process with torch 2.13 "
            "(parameters are not DTensors on the full mesh); use partial_dtensor"
        )


def _share_sequences(model: Decoder, parallel_dims: ParallelDims) -> None:
    """Context parallelism: each rank has a slice of every sequence and fetches the keys of the others."""
    mesh = parallel_dims.get_mesh("cp")
    attentions = [block.attention.inner_attention for block in model.layers.values()]
    if all(isinstance(attention, FlexAttention) for attention in attentions):
        apply_cp_to_forward(attentions, mesh)
        return
    model.cp_mesh = mesh
    for attention in attentions:
        assert isinstance(attention, SdpaAttention), "resolve_backend refuses the other backends"
        attention.cp_mesh = mesh


def _sum_gradients_plainly(model: Decoder) -> None:
    """gloo has no pre-multiplied sum, which FSDP2 otherwise uses for reductions."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def titan_model(config: Decoder.Config) -> TitanModelSpec:
    """What torchtitan's Trainer wants to know about a model."""
    return TitanModelSpec(
        name="apertus",
        flavor=f"{config.dim}x{len(config.layers)}",
        model=config,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
