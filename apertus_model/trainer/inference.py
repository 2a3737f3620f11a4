"""Loads a trained model for evaluation: the engine and the layouts of training, without an optimizer.

Invariant: all weights come from the checkpoint. The forward pass is in float32 unless a caller asks for
another type, so metrics do not depend on the precision of training.
"""

from typing import Literal

from torchtitan.config import TORCH_DTYPE_MAP, CommConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.utils import get_local_device

from apertus_model.model.attention_choice import Setting, resolve_backend
from apertus_model.trainer.config import COLLECTIVE_TIMEOUT_SECONDS, debug_config, parallelism_config
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.loading import load_model
from infra.store import Checkpoint
from specs.launch import Parallel
from specs.model import ModelSpec


def load_evaluator(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    sequence_length: int,
    attention: str,
    parallel: Parallel,
    batch_size: int,
    scratch: str,
    dtype: Literal["float32", "bfloat16"] = "float32",
    same_length: bool = False,
) -> Evaluator:
    """The model of a checkpoint, distributed over this job's processes. Collective; can be called again.

    Further arguments and errors are those of `load_model`. ValueError when the layout or the attention
    backend cannot run here.

    Args:
        attention: requested attention backend; see `resolve_backend`.
        parallel: the layout.
        batch_size: rows per forward pass and data-parallel rank.
        dtype: type of the forward pass. With the type that training used, it is training's forward pass. Only
            with float32, the weights have gradients.
        same_length: whether all rows have `sequence_length` tokens, as they do in training.
    """
    length = sequence_length if same_length else None
    backend = resolve_backend(attention, Setting.of(spec, dtype, parallel.cp, length)).backend
    parallelism = parallelism_config(parallel)
    world_size = dist_utils.init_distributed(
        CommConfig(init_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS), base_folder=scratch
    )
    dims = ParallelDims.from_config(parallelism, world_size)
    device = get_local_device()
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    dist_utils.set_determinism(dims, device, debug_config(seed=0), distinct_seed_mesh_dims=[])
    alone = world_size == 1  # all weights are rounded once they are loaded, and merged with their adapters
    model = load_model(
        spec,
        checkpoint,
        sequence_length=sequence_length,
        attention=backend,
        parallelism=parallelism,
        dims=dims,
        device=device,
        dtype="float32" if alone else dtype,
        scratch=scratch,
    ).requires_grad_(dtype == "float32")
    for weight in model.parameters() if alone else ():
        weight.data = weight.data.to(TORCH_DTYPE_MAP[dtype])
    return Evaluator(model, dims, device, batch_size=batch_size)
