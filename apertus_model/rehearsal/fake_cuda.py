"""Loads a CUDA that has no device, so that the autograd engine runs on FakeTensors of device "cuda", with the
CPU and the CUDA build of torch. Must be called before torch is imported, since that caches the CUDA hooks.

The shared object is compiled once into the user's cache folder: a device guard, and the hooks by which
autograd finds out that there is CUDA.

Invariant: nothing can be computed on this device: it has no kernels.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from infra.imports import quick_imports
from infra.store.scratch import temporary_folder

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
COMPILER = "g++"


class NoFakeCuda(RuntimeError):
    """The fake CUDA cannot be made; the message says why and what to do."""


def possible() -> bool:
    """Whether there is a compiler for `load`."""
    return shutil.which(COMPILER) is not None


def compile_once() -> Path:
    """The library that `load` loads (`shared_object`) for the installed torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return shared_object(Path(spec.origin).parent)


def load() -> None:
    """Makes FakeTensors of device "cuda" possible in this process. NoFakeCuda as for `shared_object`."""
    assert "torch" not in sys.modules, "torch has looked for CUDA already"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no GPU is touched, even if there is one
    library = ctypes.CDLL(str(compile_once()), mode=ctypes.RTLD_GLOBAL)
    with quick_imports():
        importlib.import_module("torch")
    library.register_guard()


def shared_object(torch_folder: Path, cache: Path | None = None, compiler: str | None = None) -> Path:
    """The compiled library for this torch and this source; compiled if the cache folder has none. NoFakeCuda
    when there is no compiler, or it fails."""
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apertus"
    target = cache / f"fake_cuda-{version}-{digest}.so"
    if target.exists():
        return target
    program = shutil.which(compiler or COMPILER)
    if program is None:
        raise NoFakeCuda(
            f"a rehearsal compiles a small file once and finds no {compiler or COMPILER}; install it, e.g. by"
            " `apt-get install g++`"
        )
    cache.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
    libraries = ["-Wl,--no-as-needed", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    with temporary_folder("compile", str(cache)) as folder:  # two rehearsals may compile at the same time
        library = folder / target.name
        done = subprocess.run(
            [program, "-O1", "-shared", "-fPIC", "-std=c++20", *includes, str(SOURCE), "-o", str(library),
             *libraries, f"-Wl,-rpath,{torch_folder}/lib"],
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
            raise NoFakeCuda(f"{program} cannot compile {SOURCE.name} for torch {version}: {lines[0]}")
        library.replace(target)
    return target
