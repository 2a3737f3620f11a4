"""Sets up a process of the engine before it computes, and takes it down at the end.

Invariant: the number of threads is that of the launch, since it changes floating-point sums.
"""

import ctypes
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from apertus_model.device import has_gpu

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_SINGLE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


@contextmanager
def engine_process(threads: int) -> Iterator[int]:
    """Prepares this process, as a rank of torchrun or alone; yields the number of processes."""
    prepare_process(threads)
    try:
        yield int(os.environ["WORLD_SIZE"])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def prepare_process(threads: int) -> None:
    """Sets up what every process of the engine needs before it computes."""
    if "RANK" not in os.environ:
        os.environ |= _SINGLE_PROCESS
    torch.set_num_threads(threads)
    if not has_gpu():
        _keep_freed_memory()
    _quieten_libraries(int(os.environ["RANK"]))


def _keep_freed_memory() -> None:
    """Lets glibc reuse large blocks instead of returning each to the kernel, whose page faults cost a CPU
    step a quarter of its time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _quieten_libraries(rank: int) -> None:
    """Logs our own lines on rank 0, and errors everywhere; torchtitan would warn about every CPU."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s: %(message)s")
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("apertus_model").setLevel(logging.INFO if rank == 0 else logging.ERROR)
    logging.getLogger("infra").setLevel(logging.WARNING)  # storage that is slow or refuses
    warnings.filterwarnings("ignore", module=r"torch\.|torchtitan\.|transformers\.")
