"""Chooses the attention backend. Only this module asks which GPU there is and what is installed.

`auto` takes the first of `BACKENDS` that can run. torch's variable-length kernel is the newest FlashAttention
that can be activated: version 3 on Hopper or 4 on Blackwell if installed, else torch's own version 2.

Invariant: `auto` takes no backend that would be refused on request, and says why it does not take those
before it.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import NamedTuple

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.flex_attention import _DEFAULT_SPARSE_BLOCK_SIZE

from apertus_model.device import has_gpu
from specs.model import ModelSpec

logger = logging.getLogger(__name__)

BACKENDS = (  # the best first
    "varlen",  # torch's variable-length flash attention; GPU, bfloat16
    "flash",  # variable-length attention of the flash-attn package; GPU, bfloat16
    "flex",  # torch's FlexAttention with a block mask; GPU; any precision, and context parallelism
    "sdpa",  # torch's scaled_dot_product_attention, any device and layout; a mask of L * S bytes per row
)
# Versions of FlashAttention that torch can activate in place of its own version 2, by the major compute
# capability that they run on: torch's name and the module.
NEWER = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}
OLDEST_FLASH = (8, 0)  # compute capability
# head sizes of FlashAttention 2's kernels, and of FlexAttention
LARGEST_FLASH_HEAD, FLASH_HEAD_MULTIPLE, SMALLEST_FLEX_HEAD = 256, 8, 16


class AttentionBackendError(ValueError):
    """The requested attention backend cannot run in this process; the message says why and what can."""


class Setting(NamedTuple):
    """The requirements of a run on its attention."""

    param_dtype: str  # of the forward pass, "bfloat16" or "float32"
    context_parallel: int  # ranks that share one sequence
    head_dim: int
    sequence_length: int | None = None  # of every row, in tokens; None if rows differ in length
    sparse: bool = False  # whether heads choose the keys that they see
    earlier_keys: bool = False  # queries also see keys of earlier steps of a layer schedule

    @classmethod
    def of(
        cls, model: ModelSpec, param_dtype: str, context_parallel: int, sequence_length: int | None
    ) -> Setting:
        """The requirements of a model."""
        sparse, earlier_keys = model.attention is not None, model.reads_earlier_keys
        return cls(param_dtype, context_parallel, model.head_dim, sequence_length, sparse, earlier_keys)


class Choice(NamedTuple):
    """A backend that can run, and why it was chosen."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


def resolve_backend(requested: str, setting: Setting) -> Choice:
    """The backend to run: the requested one if it can run here; for `auto` the best one. Logs it, with the
    reason. Activates the newer FlashAttention that it runs on, if any. AttentionBackendError when the
    requested backend cannot run here."""
    obstacles = {name: _obstacle(name, setting) for name in BACKENDS}
    runnable = [name for name, obstacle in obstacles.items() if obstacle is None]
    if requested != "auto" and requested not in runnable:
        obstacle = obstacles.get(requested, f"there is no such backend (known: {', '.join(BACKENDS)})")
        raise AttentionBackendError(
            f"attention backend {requested!r} cannot run here: {obstacle}; use {', '.join(runnable)} or auto"
        )
    backend = runnable[0] if requested == "auto" else requested
    reasons = ["requested"] if requested != "auto" else []
    if backend == "varlen":
        reasons.append(_kernel())
    if requested == "auto":
        better = BACKENDS[: BACKENDS.index(backend)]
        reasons += dict.fromkeys(obstacle for name in better if (obstacle := obstacles[name]))
    choice = Choice(backend, "; ".join(reasons))
    logger.info("attention backend: %s", choice)
    return choice


def _obstacle(name: str, setting: Setting) -> str | None:
    """The reason why a backend cannot run in this process; None if it can."""
    if name == "sdpa":
        return None
    if setting.earlier_keys:
        return "its masks have no keys of earlier steps of the layer schedule"
    if not has_gpu():
        return "there is no GPU, FlexAttention has no backward pass on CPU, and the flash kernels no CPU code"
    if name == "flex":
        return _flex_obstacle(setting)
    if (obstacle := _flash_obstacle(setting)) is not None:
        return obstacle
    if name == "flash" and not _installed("flash_attn"):
        return "the optional package flash-attn is not installed (pip install apertus[flash])"
    own = torch.backends.cuda.is_flash_attention_available()
    if name == "varlen" and not own and (missing := _newer()) is not None:
        return "this torch is built without FlashAttention" + (f"; {missing}" if missing else "")
    return None


def _flash_obstacle(setting: Setting) -> str | None:
    """The reason why the variable-length kernels cannot run; None if they can."""
    if setting.sparse:
        return "the variable-length kernels compute whole documents, and the heads of this model choose keys"
    if (ranks := setting.context_parallel) > 1:
        return f"the variable-length kernels cannot split a sequence over {ranks} context-parallel ranks"
    if setting.param_dtype != "bfloat16":
        return f"the variable-length kernels compute in bfloat16, this run in {setting.param_dtype}"
    if setting.head_dim % FLASH_HEAD_MULTIPLE or setting.head_dim > LARGEST_FLASH_HEAD:
        return (
            f"the variable-length kernels have heads of multiples of {FLASH_HEAD_MULTIPLE} up to"
            f" {LARGEST_FLASH_HEAD}, this model of {setting.head_dim}"
        )
    if torch.version.hip is None and (capability := torch.cuda.get_device_capability()) < OLDEST_FLASH:
        return f"the variable-length kernels need {_sm(OLDEST_FLASH)}, this GPU is {_sm(capability)}"
    return None


def _flex_obstacle(setting: Setting) -> str | None:
    """Why FlexAttention cannot compute heads of this size or sequences split over ranks; None if it can."""
    if setting.head_dim < SMALLEST_FLEX_HEAD:
        return f"FlexAttention has heads of at least {SMALLEST_FLEX_HEAD}, this model of {setting.head_dim}"
    multiple, length = _DEFAULT_SPARSE_BLOCK_SIZE * setting.context_parallel, setting.sequence_length
    if setting.context_parallel == 1 or (length is not None and length % multiple == 0):
        return None
    rows = "rows differ in length" if length is None else f"sequences have {length} tokens"
    return (
        f"FlexAttention over {setting.context_parallel} context-parallel ranks needs multiples of {multiple}"
        f" tokens, but {rows}"
    )


def _kernel() -> str:
    """A description of the FlashAttention that torch's variable-length kernel uses on this GPU."""
    missing = _newer()
    on = "ROCm" if torch.version.hip is not None else _sm(torch.cuda.get_device_capability())
    if missing is None:
        active = current_flash_attention_impl()
        assert active is not None
        return f"FlashAttention {active.removeprefix('FA')} on {on}"
    return f"FlashAttention 2 of torch on {on}" + (f"; {missing}" if missing else "")


def _newer() -> str | None:
    """Activates the FlashAttention for this GPU that is newer than torch's own. Returns None if it is active,
    else the reason why not; "" if this GPU has no newer one."""
    major, _ = torch.cuda.get_device_capability()
    if torch.version.hip is not None or major not in NEWER:
        return ""
    name, module = NEWER[major]
    if not _installed(module):
        return f"{module}, which brings FlashAttention {name.removeprefix('FA')}, is not installed"
    if current_flash_attention_impl() != name:
        try:
            activate_flash_attention_impl(name)
        except (ImportError, RuntimeError, AttributeError) as error:
            return f"{module} does not work: {error}"
    return None


def _installed(module: str) -> bool:
    """Whether a module is installed; imports its package, but not the module."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not installed
        return False


def _sm(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability)
