"""Distributes a model: tensor and context parallelism, activation checkpointing, compile, FSDP2.

Invariant: gradients are summed, never averaged; the loss is already divided by the global number of trained
tokens.
"""

from typing import Any

import torch
import torch._dynamo.config as dynamo
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, get_fsdp_reshard_after_forward_policy
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.model_spec import ModelSpec as TitanModelSpec

from apertus_model.model.attention import SdpaAttention
from apertus_model.model.model import ApertusModel
from apertus_model.model.pass_weights import PassWeights


def parallelize(
    model: ApertusModel,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: Any,
    dump_folder: str,
) -> ApertusModel:
    """Applies a layout to a model, or a stage of a pipeline, on the meta device, in place. The
    arguments are those that torchtitan passes."""
    if parallel_dims.cp_enabled:
        model.cp_load_balancer = parallelism.context_parallel_load_balancer
        _share_sequences(model, parallel_dims)
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    compiled = compile_config.enable and "model" in compile_config.components
    if compiled:
        compile_layers(model, compile_config, parallel_dims)
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    if needs_fsdp(parallel_dims, training):
        apply_fsdp(model, parallel_dims, training, parallelism, compiled)
    elif any(parameter.dtype != dtype for parameter in model.parameters()):
        model.pass_weights = PassWeights(model, dtype)
    return model


def needs_fsdp(parallel_dims: ParallelDims, training: TrainingConfig) -> bool:
    """Whether weights are shared, or lie on another device than the passes. FSDP around one process would
    copy each weight for each pass of each micro-batch."""
    return parallel_dims.world_size > 1 or training.enable_cpu_offload


def apply_fsdp(
    model: ApertusModel,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compiled: bool,
) -> None:
    """Shards the parameters over the processes, in place."""
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh = parallel_dims.get_mesh(axes)
    if not compiled:  # graphs of whole layers have no gathers inside
        _gather_halves(model, mesh, training, parallelism, parallel_dims.pp_enabled)
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
    )
    if torch.distributed.get_backend() == "gloo":  # it has no pre-multiplied sum, which FSDP2 otherwise uses
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def compile_layers(model: ApertusModel, config: CompileConfig, parallel_dims: ParallelDims) -> None:
    """Compiles each layer, in place. All layers share their graphs: two for each way in which a layer is
    called, with and without gradients. dynamo ends a process that needs more graphs than its limit."""
    if model.schedule is not None:
        dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * model.schedule.forms)
    apply_compile(model, compile_config=config, parallel_dims=parallel_dims)


def _share_sequences(model: ApertusModel, parallel_dims: ParallelDims) -> None:
    """Context parallelism: each rank has a part of every sequence and fetches the others' keys."""
    mesh = parallel_dims.get_mesh("cp")
    attentions = [block.attention.inner_attention for block in model.layers.values()]
    if all(isinstance(attention, FlexAttention) for attention in attentions):
        apply_cp_to_forward(attentions, mesh)
        return
    model.cp_mesh = mesh
    for attention in attentions:
        assert isinstance(attention, SdpaAttention), "resolve_backend refuses the other backends"
        attention.cp_mesh = mesh


def _gather_halves(
    model: ApertusModel, mesh: DeviceMesh, training: TrainingConfig, parallelism: ParallelismConfig, pp: bool
) -> None:
    """Makes FSDP gather and reduce each half of a layer by itself, for layers that share a step: these run a
    half at a time, and FSDP would gather and reduce whole layers twice."""
    steps = () if model.schedule is None else model.schedule.steps
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    reshard = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, pp)
    offload = fsdp.CPUOffloadPolicy() if training.enable_cpu_offload else fsdp.OffloadPolicy()
    for layer in (model.layers[str(index)] for step in steps if step.beside for index in step.layers):
        for half in (layer.attention, layer.feed_forward):
            fsdp.fully_shard(
                half, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, offload_policy=offload
            )


def titan_model(config: ApertusModel.Config) -> TitanModelSpec:
    """The description of a model that torchtitan's Trainer takes."""
    return TitanModelSpec(
        name="apertus",
        flavor=f"{config.dim}x{len(config.layers)}",
        model=config,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
