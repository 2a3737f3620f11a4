"""torchtitan computes on one device, and kernels run where they can."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torchtitan.tools.utils

import apertus_model.trainer.config  # with all that trains  # noqa: F401
from apertus_model import device
from tests.apertus_model.ranks import in_processes


def test_every_module_of_torchtitan_computes_on_the_device_of_the_shim() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    for name in (
        "torchtitan.distributed.utils",
        "torchtitan.distributed.parallel_dims",
        "torchtitan.tools.utils",
    ):
        assert importlib.import_module(name).device_type == expected, name
    assert torchtitan.tools.utils.device_module.get_device_properties(None).total_memory > 2**28


def test_kernels_run_on_a_gpu_in_the_dtypes_of_training_and_not_while_torch_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has(dtype: torch.dtype, is_cuda: bool = True) -> bool:
        return device.has_kernels(SimpleNamespace(is_cuda=is_cuda, dtype=dtype))  # type: ignore[arg-type]

    assert has(torch.bfloat16) and has(torch.float32)
    assert not has(torch.float64) and not has(torch.bfloat16, is_cuda=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not has(torch.bfloat16)


def missing_names(source: str) -> Iterator[str]:
    """Names below `torch.` that a source file uses and torch does not have."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute() if re.fullmatch(r"torch(\.\w+)+", name := ast.unparse(node)):
                names = name.split(".")
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "torch":
                yield from (name for alias in node.names for name in missing_names(f"{module}.{alias.name}"))
                continue
            case _:
                continue
        found: object = torch
        for number, part in enumerate(names[1:], 2):
            if not isinstance(found, ModuleType):
                break  # an object's attributes are not known here
            if not hasattr(found, part):
                try:
                    importlib.import_module(".".join(names[:number]))
                except ImportError:
                    yield name
                    break
            found = getattr(found, part)


def test_torch_has_what_the_engine_and_torchtitan_use_of_it() -> None:
    """In lines that only run on GPUs, too. torchtitan 0.3.0 was made with nightly builds of torch."""
    loaded = [
        module for name, module in sys.modules.items() if name.startswith(("torchtitan.", "apertus_model."))
    ]
    sources = {module.__name__: Path(module.__file__) for module in loaded if module.__file__}
    missing = {name: set(missing_names(source.read_text())) for name, source in sources.items()}
    assert "torchtitan.distributed.utils" in missing and "apertus_model.trainer.trainer" in missing
    assert {name: names for name, names in missing.items() if names} == {
        "torchtitan.distributed.utils": {"torch.distributed.set_timeout"}  # ours is `set_collective_timeout`
    }


def test_a_collective_that_a_rank_does_not_join_fails_after_the_timeout(tmp_path: Path) -> None:
    from torchtitan.distributed import ParallelDims  # after the engine

    def failed(rank: int) -> bool:
        torch.distributed.init_process_group("gloo")
        dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, world_size=2)
        mesh = dims.get_mesh("dp_shard")
        device.set_collective_timeout(timedelta(seconds=0.1), dims)
        if rank == 0:
            with pytest.raises(RuntimeError, match="Timed out"):
                torch.distributed.all_reduce(torch.ones(1), group=mesh.get_group())
        return True  # which the other rank waits for

    assert in_processes(tmp_path, failed, 2) == [True, True]


@pytest.mark.slow
def test_importing_the_engine_prints_nothing() -> None:
    """With torchao installed, too, whose libraries are of other builds of torch."""
    command = [sys.executable, "-c", "import apertus_model.trainer.config"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
