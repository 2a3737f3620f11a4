"""Tensor-parallel layout of every sub-module, in torchtitan's declarative form. The model imports this file
and not `parallelize`, which needs parts of torch that are missing on some machines used only for evaluation.

Linear layers into attention and feed-forward are column-parallel, those out of them row-parallel; norms and
the xIELU scalars are replicated. torchtitan leaves out the axes that a run does not have.

Parameters that are replicated and used on a part of the activations have partial gradients: the two scalars,
the norms of queries and keys, and with sequence parallelism the other norms. FSDP sums these gradients over
the ranks before it reduces them, parameter by parameter: in a pipeline once a step, else once a micro-batch.
The formula of xIELU sums the gradients of its scalars in every micro-batch, since softplus is not linear; its
kernel leaves them partial.
"""

from dataclasses import replace
from typing import Any

import spmd_types as spmd
from torchtitan.models.common import decoder_sharding as titan
from torchtitan.protocols.sharding import ShardingConfig

from apertus_model.model.output import RewardHead


def set_sharding(config: Any, *, sequence_parallel: bool) -> None:
    """Fills `sharding_config` of every sub-config of an `ApertusModel.Config`, in place."""
    titan.set_decoder_sharding_config(config, enable_sp=sequence_parallel)
    head = replace(config.lm_head.sharding_config, out_src_shardings=None, out_dst_shardings=None)
    if isinstance(config.lm_head, RewardHead.Config):
        head = replace(head, state_shardings={"score": titan.dense_param_placement(tp=spmd.R)})
    config.lm_head.sharding_config = head  # the layer splits and sums what it returns
    block_input = (
        titan.dense_sequence_parallel_placement()
        if sequence_parallel
        else titan.dense_activation_placement(tp=spmd.I)
    )
    heads = titan.dense_activation_placement(tp=spmd.S(2))
    replicated = titan.dense_param_placement(tp=spmd.R)
    for layer in config.layers:
        layer.attention_norm.sharding_config = titan.norm_config(enable_sp=sequence_parallel)
        layer.ffn_norm.sharding_config = titan.norm_config(enable_sp=sequence_parallel)
        titan.set_gqa_attention_sharding(layer.attention, enable_sp=sequence_parallel)
        if hasattr(layer.attention, "set_own_sharding"):  # a token mixer with more modules than attention
            layer.attention.set_own_sharding()
        titan.set_gqa_inner_attention_local_map(layer.attention.inner_attention)
        if layer.attention.qk_norm is not None:
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
            in_dst_shardings={"x": titan.dense_activation_placement(tp=spmd.R)},
        )
        feed_forward.up_proj.sharding_config = titan.colwise_config()
        if feed_forward.gate_proj is not None:
            feed_forward.gate_proj.sharding_config = titan.colwise_config()
        else:
            feed_forward.act.sharding_config = ShardingConfig(
                state_shardings={"alpha_p": replicated, "alpha_n": replicated}
            )
        feed_forward.down_proj.sharding_config = titan.rowwise_config(output_sp=sequence_parallel)
    if config.schedule is not None:
        _join_layers(config, block_input)
        if config.schedule.norm is not None:
            config.schedule.norm.sharding_config = titan.norm_config(enable_sp=sequence_parallel)


def _join_layers(config: Any, block_input: Any) -> None:
    """Keeps what the layers of one step add as partial sums of each rank until all of it is added up."""
    for step in config.schedule.steps:
        for layer in (config.layers[index] for index in step.layers if step.beside):
            for last in (layer.attention.wo, layer.feed_forward.down_proj):
                last.sharding_config = replace(last.sharding_config, out_dst_shardings=None)
    config.schedule.joined.sharding_config = ShardingConfig(
        out_src_shardings=titan.dense_activation_placement(tp=spmd.P), out_dst_shardings=block_input
    )
