"""Run by test_attention_choice in a process of its own, since the fake CUDA is loaded before torch.

Builds a model of one layer for every shape of heads, backend and number of ranks that share a sequence, and
runs it forward and backward on tensors without values, among two ranks of which the other does nothing. Reads
the shapes as JSON: [heads, key heads, head dimension]. Prints, as JSON, what the backend computed or why it
was refused, by "backend, cp N, heads/key heads x head dimension"; for the first shape also with sparse
attention, by "backend, method".
"""

# ruff: noqa: E402, I001
from __future__ import annotations

import contextlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from apertus_model.rehearsal import fake_cuda

os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
fake_cuda.load()

import torch  # after the fake CUDA

from apertus_model.rehearsal import patches
from apertus_model.rehearsal.rates import Rates

RATES = Rates("H100", 2)
patches.apply(patches.cuda(RATES, torch.Stream(device="cuda:0")))
kept = patches.fused_operators()

import apertus_model.trainer  # before anything of torchtitan  # noqa: F401
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed import ParallelDims

from apertus_model.model import attention_choice
from apertus_model.model.attention_choice import BACKENDS, AttentionBackendError, Setting, resolve_backend
from apertus_model.model.model import model_config
from apertus_model.model.parallelize import parallelize
from apertus_model.rehearsal.observer import StepObserver
from apertus_model.trainer.loader import model_arguments
from apertus_model.trainer.config import parallelism_config
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.sparse_attention import Dropped, Hashed, SparseAttention

LENGTH = 256
SPARSE = (Hashed(sparse="hash"), Dropped(sparse="drop"))
ROWS = [[*range(100), *range(3), *range(LENGTH - 103)], [*range(50, 50 + 200), *range(LENGTH - 200)]]


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """In place of the function of the package flash-attn, with its names of arguments."""
    assert set(options) == {"softmax_scale", "causal", "deterministic"}, options
    out: torch.Tensor = torch.nn.attention.varlen.varlen_attn(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size=(-1, 0), enable_gqa=True
    )
    return out


def trace(shape: list[int], backend: str, cp: int, sparse: SparseAttention | None = None) -> str:
    heads, kv_heads, head_dim = shape
    spec = ModelSpec(dim=128, n_layers=1, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, ffn_dim=256,
                     vocab_size=128, attention=sparse)  # fmt: skip
    try:
        resolve_backend(backend, Setting("bfloat16", cp, head_dim, LENGTH, sparse is not None))
    except AttentionBackendError as error:
        return str(error)
    parallelism = parallelism_config(Parallel(cp=cp))
    dims = ParallelDims.from_config(parallelism, 2)
    with torch.device("meta"):
        model = model_config(spec, sequence_length=LENGTH, attention=backend).build()
    parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="bfloat16"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_states()
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    positions = torch.tensor(ROWS)
    tokens, _, arguments = model_arguments(model, dims, torch.device("cuda"), tokens, positions, tokens)
    logits = model(tokens, **arguments)
    logits.sum().backward()
    linear = model.layers["0"].attention.qkv_linear
    missing = [name for name in ("wq", "wk", "wv") if getattr(linear, name).weight.grad is None]
    return f"{logits.device.type} {list(logits.shape)} {missing}"


def main(shapes: list[list[int]]) -> dict[str, str]:
    observer = StepObserver(RATES, "cuda")
    patches.apply([
        *patches.world(SimpleNamespace(agree=None, send=None, receive=None)),
        *patches.values(observer.read, contextlib.nullcontext, observer.allocations.resized, print),
    ])  # fmt: skip
    sys.modules["flash_attn"] = SimpleNamespace(  # type: ignore[assignment]
        flash_attn_varlen_func=flash_attn_varlen_func
    )
    attention_choice._installed = lambda module: module == "flash_attn"
    torch.autograd.set_multithreading_enabled(False)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with observer:
        return {
            f"{backend}, cp {cp}, {shape[0]}/{shape[1]} x {shape[2]}": trace(shape, backend, cp)
            for shape in shapes
            for backend in BACKENDS
            for cp in (1, 2)
        } | {
            f"{backend}, {method.sparse}": trace(shapes[0], backend, 1, method)
            for backend in BACKENDS
            for method in SPARSE
        }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
