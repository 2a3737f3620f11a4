"""Replaces names of torch and Triton for a rehearsal: one table, with the reason for each line.

Invariant: every name is looked up before anything is replaced, so that an error about a new torch states the
names that it lacks, and does not come later.
"""

import contextlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from apertus_model.rehearsal.rates import Rates


class MissingTarget(RuntimeError):
    """A name that a rehearsal replaces does not exist in this torch, or in this Triton."""


@dataclass(frozen=True)
class Patch:
    """A name, and the function that makes its replacement from the original."""

    target: str
    replacement: Callable[[Any], Any]


def always(value: Any) -> Callable[[Any], Any]:
    """Replaces a function by one that returns `value`."""
    return lambda original: lambda *args, **kwargs: value


def instead(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def apply(patches: Iterable[Patch]) -> None:
    """Applies all patches, or none. MissingTarget, with all their names, when some do not exist."""
    patches = list(patches)
    check(patch.target for patch in patches)
    for patch in patches:
        owner, name = resolve(patch.target)
        setattr(owner, name, patch.replacement(getattr(owner, name)))


def check(targets: Iterable[str]) -> None:
    """Raises MissingTarget with all names that do not exist."""
    import torch

    missing = []
    for target in targets:
        try:
            resolve(target)
        except LookupError:
            missing.append(target)
    if missing:
        raise MissingTarget(
            f"torch {torch.__version__} has no {', '.join(missing)}, which a rehearsal needs. Fix: install"
            " the release that constraints.txt names, or say in apertus_model/rehearsal what takes its place"
        )


def resolve(target: str) -> tuple[Any, str]:
    """The object that holds the name, and the last part of the name. LookupError when it does not exist."""
    path, name = target.rsplit(".", 1)
    try:
        owner = pkgutil.resolve_name(path)
        getattr(owner, name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise LookupError(target) from error
    return owner, name


# Operators with a kernel of their own on a GPU, which a CPU build composes from others. With a kernel
# registered, autograd keeps for the backward pass what it keeps on a GPU.
FUSED = ("_fused_rms_norm", "_fused_rms_norm_backward")
# Functions of FSDP that sum gradients before they are reduced.
SUMS = ("to_accumulated_grad_if_needed", "accumulate_unsharded_grad_if_needed")
# Internal names of torch that are used and not replaced.
USED = (
    *(f"torch._C.{name}" for name in ("_autograd._get_sequence_nr", "_current_autograd_node",
      "_current_graph_task_id", "_dispatch_has_kernel_for_dispatch_key", "_get_dispatch_mode",
      "_set_only_lift_cpu_tensors", "_TorchDispatchModeKey.FAKE")),
    "torch.autograd.graph._engine_run_backward",
    *(f"torch.distributed.pipelining._utils.{name}" for name in ("_StageBackwardMeta", "_StageForwardMeta",
      "InferenceMode.DYNAMIC", "extract_tensor_meta")),
    *(f"torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.{name}" for name in SUMS),
    *(f"torch.ops.aten.{name}" for name in FUSED),
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.utils.flop_counter.flop_registry",
)  # fmt: skip


def cuda(rates: Rates, stream: Any) -> list[Patch]:
    """The patches that make `torch.cuda` that of a machine with one GPU of this kind per process, which has
    one stream. They must be applied before torchtitan is imported, which then looks for a GPU."""
    import torch

    major, minor = rates.capability
    facts = SimpleNamespace(
        name=rates.name, major=major, minor=minor, total_memory=int(rates.memory), multi_processor_count=132
    )
    values = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "set_device": None, "empty_cache": None, "_lazy_init": None,
        "get_device_name": rates.name, "get_device_capability": rates.capability,
        "get_device_properties": facts, "memory_stats": {}, "reset_peak_memory_stats": None,
        "current_stream": stream, "stream": contextlib.nullcontext(), "is_current_stream_capturing": False,
        "get_rng_state": torch.empty(0), "set_rng_state": None, "manual_seed_all": None,
    }  # fmt: skip
    return [
        *(Patch(f"torch.cuda.{name}", always(value)) for name, value in values.items()),
        # as in every build for CUDA
        Patch("torch.backends.cuda.is_flash_attention_available", always(True)),
        Patch("torch.Tensor.pin_memory", instead(lambda tensor: tensor)),
        Patch("torch.cuda.Stream", instead(torch.Stream)),
        Patch("torch.cuda.Event", instead(torch.Event)),
        # torch would make FakeTensors of an available device on that device
        Patch("torch._subclasses.fake_tensor.init_gpu_context", always(None)),
        Patch("torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init",
              instead(property(lambda mode: True))),
    ]  # fmt: skip


def world(peers: Any) -> list[Patch]:
    """The patches that stand in for the other ranks. `peers`: `rehearsal.step.PipelinePeers`."""
    pipelining = "torch.distributed.pipelining"
    return [
        # groups of gloo wait for the other ranks
        Patch("torch.distributed.new_group", lambda new: lambda *args, **kw: new(*args, **kw | FAKE_BACKEND)),
        # stages of a pipeline tell each other the shapes that they exchange
        Patch(f"{pipelining}.schedules._PipelineSchedule._warmup_p2p", _method(peers.agree)),
        Patch(f"{pipelining}.stage.PipelineStage._send_meta", _method(peers.send)),
        Patch(f"{pipelining}.stage.PipelineStage._recv_meta", _method(peers.receive)),
    ]


FAKE_BACKEND = {"backend": "fake"}


def _method(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replaces a method of another class by a bound method, which gets the object as its first argument."""
    return lambda original: lambda *args, **kwargs: function(*args, **kwargs)


def values(tolist: Callable[[Any], Any], unseen: Callable[[], contextlib.AbstractContextManager[Any]],
           resized: Callable[[Any], None], launched: Callable[..., None]) -> list[Patch]:  # fmt: skip
    """The patches of functions that need values, or that no dispatch mode sees. `tolist` returns a tensor
    without values as nested lists; `unseen` is a context for what is not part of the step; `resized` gets a
    storage whose size has changed, `launched` a Triton kernel and its arguments."""

    def resize(original: Any) -> Any:
        def call(storage: Any, size: int) -> Any:
            result = original(storage, size)
            resized(storage)
            return result

        return call

    def hidden(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with unseen():
                return original(*args, **kwargs)

        return call

    return [
        Patch("torch._subclasses.fake_tensor.FakeTensor.tolist", _method(tolist)),
        # memory that GPUs share, for async_tp
        Patch("torch.distributed._symmetric_memory.enable_symm_mem_for_group", always(None)),
        # FSDP frees and allocates gathered weights this way
        Patch("torch.UntypedStorage.resize_", resize),
        Patch("triton.runtime.jit.JITFunction.run", lambda original: lambda kernel, *args, **kwargs:
              launched(kernel, *args)),
        # kernels are not compiled: FlexAttention is a single operator, and its mask costs nothing
        Patch("torch.compile", instead(_not_compiled)),
        Patch("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", instead(True)),
        Patch("torch.distributed.tensor.experimental._context_parallel._attention.create_block_mask", hidden),
        Patch("torchtitan.models.common.attention._compiled_create_block_mask", hidden),
        # the first step of a pipeline runs its layers once more, to learn shapes
        Patch("torch.distributed.pipelining.schedules._PipelineSchedule._initialize_pp_stages", hidden),
    ]  # fmt: skip


def _not_compiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else (lambda function: function)


def fused_operators() -> Any:
    """Registers a kernel for each operator of `FUSED`; the result keeps the kernels registered."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    for name in FUSED:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _has_no_values, "CUDA")
    return library


def _has_no_values(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("tensors of a rehearsal have no values")
