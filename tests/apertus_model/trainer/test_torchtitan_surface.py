"""What the engine uses of torchtitan 0.3.0 and torch beyond their documented interface.

A failure here means: read the new source, then change the one file that is named, before anything else is
trusted.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import apertus_model.trainer  # noqa: F401

ROOT = Path(__file__).resolve().parents[3]
SIGNATURES = {
    # apertus_model/device.py
    "torchtitan.distributed.utils.set_pg_timeouts": ["timeout", "parallel_dims"],
    # apertus_model/trainer/trainer.py
    # ours does the same, and judges the step before the update
    "torchtitan.trainer.Trainer.train_step": ["self", "data_iterator"],
    "torchtitan.distributed.utils.clip_grad_norm_": [
        "parameters", "max_norm", "norm_type", "error_if_nonfinite", "foreach", "pp_mesh", "ep_enabled",
    ],
    "torchtitan.distributed.utils.dist_sum": ["x", "mesh", "extra_pg"],
    "torchtitan.distributed.utils.dist_sum_tensor": ["x", "mesh", "extra_pg"],
    "torchtitan.trainer.Trainer.batch_generator": ["self", "data_iterable"],
    "torchtitan.trainer.Trainer.post_dataloading_process": ["self", "input_dict", "labels"],
    "torchtitan.distributed.context_parallel.cp_shard": [
        "cp_mesh", "inputs", "attention_masks", "load_balancer_type", "input_seq_dim", "ptrr_mask_key",
    ],
    "torch.distributed.pipelining.schedules.PipelineScheduleSingle.step": [
        "self", "args", "target", "losses", "return_outputs", "loss_kwargs", "kwargs",
    ],
    "torch.distributed.pipelining.schedules.PipelineScheduleMulti.eval": ["self", "args", "target", "losses",
    "kwargs"],
    # apertus_model/model/parallelize.py
    "torchtitan.distributed.pipeline_parallel.pipeline_llm": [
        "model", "parallel_dims", "training", "parallelism", "compile_config", "ac_config", "dump_folder",
        "device", "model_config",
        "parallelize_fn", "loss_fn",
    ],
    # apertus_model/model/lora.py
    "torchtitan.components.lora._get_lora_cls": ["parent_cls"],
    "torchtitan.protocols.module.Module._init_self_buffers": ["self", "buffer_device"],
    "torchtitan.models.common.decoder_sharding.dense_param_placement": ["tp"],
    # apertus_model/trainer/metrics.py
    "torchtitan.components.metrics.MetricsProcessor.log": [
        "self", "step", "global_avg_loss", "global_max_loss", "grad_norm", "extra_metrics",
    ],
    "torchtitan.components.metrics.MetricsProcessor.should_log": ["self", "step"],
    # apertus_model/trainer/optimizer.py
    "torchtitan.components.optimizer.LRSchedulersContainer.Config.build": ["self", "optimizers",
    "training_steps"],
    "torchtitan.components.optimizer.OptimizersContainer._resolve_optimizer_factory": ["name"],
    "torchtitan.components.optimizer.utils.init_optim_state": ["optim"],
    # apertus_model/optimizers/muon.py
    "torch.optim._muon._adjust_lr": ["lr", "adjust_lr_fn", "param_shape"],
    "torch.optim._muon._zeropower_via_newtonschulz": ["grad", "ns_coefficients", "ns_steps", "eps"],
    # apertus_model/trainer/checkpoint.py
    "torchtitan.components.checkpointer.BaseCheckpointManager._load": ["self", "step"],
    "torchtitan.components.checkpointer.BaseCheckpointManager._save": ["self", "curr_step", "last_step"],
    "torchtitan.components.checkpointer.base.ModelWrapper.load_state_dict": ["self", "state_dict"],
    # apertus_model/trainer/checkpoint_writer.py
    "torch.distributed.checkpoint.DefaultSavePlanner.set_up_planner": ["self", "state_dict", "storage_meta",
    "is_coordinator"],
    "torch.distributed.checkpoint.DefaultSavePlanner.create_local_plan": ["self"],
    "torch.distributed.checkpoint.DefaultSavePlanner.resolve_data": ["self", "write_item"],
    "torch.distributed.checkpoint.StorageWriter.prepare_local_plan": ["self", "plan"],
    "torch.distributed.checkpoint.StorageWriter.prepare_global_plan": ["self", "plans"],
    "torch.distributed.checkpoint.StorageWriter.write_data": ["self", "plan", "planner"],
    "torch.distributed.checkpoint.StorageWriter.finish": ["self", "metadata", "results"],
    # apertus_model/trainer/checkpoint_reader.py
    "torch.distributed.checkpoint.StorageReader.read_metadata": ["self", "args", "kwargs"],
    "torch.distributed.checkpoint.StorageReader.set_up_storage_reader": ["self", "metadata",
    "is_coordinator", "args", "kwargs"],
    "torch.distributed.checkpoint.StorageReader.read_data": ["self", "plan", "planner"],
    "torch.distributed.checkpoint.LoadPlanner.resolve_tensor": ["self", "read_item"],
    "torch.distributed.checkpoint.LoadPlanner.commit_tensor": ["self", "read_item", "tensor"],
    # apertus_model/model/rotation.py
    "torchtitan.models.common.CosSinRoPE._precompute_cache": ["self"],
    # apertus_model/model/init.py
    "torch.distributed.tensor.DTensor.__create_chunk_list__": ["self"],
    # apertus_model/trainer/evaluator.py
    "torchtitan.distributed.context_parallel.prepare_context_parallel_input": [
        "inputs", "labels", "extra_kwargs", "cp_mesh", "device", "load_balancer_type", "ptrr_mask_key",
    ],
}  # fmt: skip


def resolve(path: str) -> Any:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise LookupError(path)


@pytest.mark.parametrize("path", SIGNATURES)
def test_a_name_that_the_engine_relies_on_is_unchanged(path: str) -> None:
    assert list(inspect.signature(resolve(path)).parameters) == SIGNATURES[path]


def test_a_layer_with_an_adapter_has_the_attributes_that_lora_py_uses() -> None:
    from torchtitan.components.lora import _get_lora_cls
    from torchtitan.models.common import Linear

    layer = _get_lora_cls(Linear).Config(in_features=2, out_features=3, rank=4, alpha=2.0).build()
    assert layer._lora_scaling == 0.5
    assert [tuple(adapter.weight.shape) for adapter in (layer.lora_a, layer.lora_b)] == [(4, 2), (3, 4)]
    assert all("weight" in adapter._param_init for adapter in (layer.lora_a, layer.lora_b))


def test_the_files_to_read_exist() -> None:
    named = re.findall(r"# (apertus_model/\S+\.py)", Path(__file__).read_text("utf-8"))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_reason_for_refusing_pipelines_still_holds() -> None:
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    assert "arg_mbs" not in inspect.signature(_PipelineSchedule.step).parameters
