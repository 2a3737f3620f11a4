"""Builds a model in a layout and fills it from a checkpoint, without an optimizer: for evaluation, and for
models that a loss consults."""

import torch
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims

from apertus_model.model.model import ApertusModel, model_config
from apertus_model.model.parallelize import parallelize
from apertus_model.model.sharding import set_sharding
from apertus_model.trainer.checkpoint import load_tensors
from infra.store import Checkpoint
from specs.model import ModelSpec


def load_model(
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    *,
    sequence_length: int,
    attention: str,
    parallelism: ParallelismConfig,
    dims: ParallelDims,
    device: torch.device,
    dtype: str,
    scratch: str,
    stored_dtype: str = "float32",
    alone: bool = False,
) -> ApertusModel:
    """The model, whole and in evaluation mode, distributed over `dims`. Collective, unless `alone`.

    Args:
        spec: dimensions of the model.
        checkpoint: as for `load_tensors`; None leaves initial weights.
        sequence_length: longest sequence, in tokens.
        attention: a backend that can run here (`attention_choice.resolve_backend`).
        parallelism, dims: the layout.
        device: where the model computes.
        dtype: of the forward pass.
        scratch: local folder for torchtitan's own files.
        stored_dtype: of the weights between passes. Weights that are stored in `dtype` take part in a pass
            with the same bits as weights that FSDP rounds to `dtype` for the pass.
        alone: whether only some of the processes load the model, without collectives over all processes.

    Raises:
        CheckpointError, DamagedCheckpoint: as `load_tensors` does.
    """
    config = model_config(spec, sequence_length=sequence_length, attention=attention)
    set_sharding(config, sequence_parallel=parallelism.enable_sequence_parallel)
    with torch.device("meta"):
        model = config.build()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(TORCH_DTYPE_MAP[stored_dtype])
    parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=dtype),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder=scratch,
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    if checkpoint is not None:
        state = dict(model.state_dict())
        load_tensors(state, checkpoint, alone=alone)
        model.load_state_dict(state)
    return model.eval()
