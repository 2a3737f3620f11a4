"""Which attention backend runs on which GPU, with what is installed there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import (
    _registry,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from apertus_model.model.attention import document_offsets, inner_attention
from apertus_model.model.attention_choice import (
    BACKENDS,
    NEWER,
    AttentionBackendError,
    Setting,
    resolve_backend,
)
from apertus_model.rehearsal import fake_cuda
from specs.model import ModelSpec
from specs.recipe import load

RECIPES = Path(__file__).parents[3] / "specs" / "recipes"
FA3, FA4, FA2 = "flash_attn_interface", "flash_attn.cute.interface", "flash_attn"
BFLOAT16 = Setting("bfloat16", 1, 128, 4096)
SPLIT = BFLOAT16._replace(context_parallel=2)


class Handle:
    """Of an activated FlashAttention."""

    def remove(self) -> None:
        pass


@contextmanager
def machine(
    capability: tuple[int, int] | None,
    installed: Collection[str] = (),
    *,
    works: bool = True,
    own: bool = True,
    hip: str | None = None,
) -> Iterator[None]:
    """A machine with a GPU of a compute capability (None: without a GPU), where these modules are installed.

    Args:
        capability: of the GPU.
        installed: modules.
        works: whether a newer FlashAttention that is installed can be activated.
        own: whether torch is built with its own.
        hip: version of ROCm.
    """

    def activate() -> Handle:
        if not works:
            raise RuntimeError("it does not expose kernels")
        return Handle()

    known = _registry._FLASH_ATTENTION_IMPLS.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: own)
        patch.setattr(torch.version, "hip", hip)
        patch.setattr("apertus_model.model.attention_choice._installed", lambda module: module in installed)
        for name, _ in NEWER.values():
            register_flash_attention_impl(name, register_fn=activate)
        try:
            yield
        finally:
            restore_flash_attention_impl(_raise_warn=False)
            _registry._FLASH_ATTENTION_IMPLS.update(known)


NO_GPU = "there is no GPU, FlexAttention has no backward pass on CPU, and the flash kernels no CPU code"
NO_FA3 = f"{FA3}, which brings FlashAttention 3, is not installed"
NO_FA4 = f"{FA4}, which brings FlashAttention 4, is not installed"
BROKEN = "does not work: it does not expose kernels"
UNBUILT = "this torch is built without FlashAttention"
CANNOT_SPLIT = "the variable-length kernels cannot split a sequence over 2 context-parallel ranks"
NEEDS = "FlexAttention over 2 context-parallel ranks needs multiples of 256 tokens, but"
HEADS = "the variable-length kernels have heads of multiples of 8 up to 256, this model of"
NO_FLASH = "the optional package flash-attn is not installed (pip install apertus[flash])"

# compute capability, what is installed there and how, the setting, and what `auto` says
CASES: list[tuple[tuple[int, int] | None, Collection[str], dict[str, Any], Setting, str]] = [
    (None, (FA3, FA4, FA2), {}, BFLOAT16, f"sdpa ({NO_GPU})"),
    # what is newer than torch's own is for one kind of GPU each
    ((8, 0), (), {}, BFLOAT16, "varlen (FlashAttention 2 of torch on sm_80)"),
    ((8, 0), (FA3, FA4, FA2), {}, BFLOAT16, "varlen (FlashAttention 2 of torch on sm_80)"),
    ((8, 9), (), {}, BFLOAT16, "varlen (FlashAttention 2 of torch on sm_89)"),
    ((9, 0), (), {}, BFLOAT16, f"varlen (FlashAttention 2 of torch on sm_90; {NO_FA3})"),
    ((9, 0), (FA4, FA2), {}, BFLOAT16, f"varlen (FlashAttention 2 of torch on sm_90; {NO_FA3})"),
    ((9, 0), (FA3,), {}, BFLOAT16, "varlen (FlashAttention 3 on sm_90)"),
    ((9, 0), (FA3, FA4, FA2), {}, BFLOAT16, "varlen (FlashAttention 3 on sm_90)"),
    ((9, 0), (FA3,), {"works": False}, BFLOAT16,
     f"varlen (FlashAttention 2 of torch on sm_90; {FA3} {BROKEN})"),
    ((10, 0), (), {}, BFLOAT16, f"varlen (FlashAttention 2 of torch on sm_100; {NO_FA4})"),
    ((10, 0), (FA3,), {}, BFLOAT16, f"varlen (FlashAttention 2 of torch on sm_100; {NO_FA4})"),
    ((10, 0), (FA4,), {}, BFLOAT16, "varlen (FlashAttention 4 on sm_100)"),
    ((10, 3), (FA4,), {}, BFLOAT16, "varlen (FlashAttention 4 on sm_103)"),
    ((10, 0), (FA4,), {"works": False}, BFLOAT16,
     f"varlen (FlashAttention 2 of torch on sm_100; {FA4} {BROKEN})"),
    ((12, 0), (FA3, FA4), {}, BFLOAT16, "varlen (FlashAttention 2 of torch on sm_120)"),
    ((9, 4), (FA3,), {"hip": "7.0"}, BFLOAT16, "varlen (FlashAttention 2 of torch on ROCm)"),
    # a torch without its own
    ((8, 0), (), {"own": False}, BFLOAT16, f"flex ({UNBUILT}; {NO_FLASH})"),
    ((8, 0), (FA2,), {"own": False}, BFLOAT16, f"flash ({UNBUILT})"),
    ((9, 0), (FA2,), {"own": False}, BFLOAT16, f"flash ({UNBUILT}; {NO_FA3})"),
    ((9, 0), (FA3, FA2), {"own": False}, BFLOAT16, "varlen (FlashAttention 3 on sm_90)"),
    ((9, 0), (FA3,), {"own": False, "works": False}, BFLOAT16,
     f"flex ({UNBUILT}; {FA3} {BROKEN}; {NO_FLASH})"),
    # what a GPU, a precision, a layout or a model rules out
    ((7, 5), (FA2,), {}, BFLOAT16, "flex (the variable-length kernels need sm_80, this GPU is sm_75)"),
    ((9, 0), (FA3, FA2), {}, BFLOAT16._replace(param_dtype="float32"),
     "flex (the variable-length kernels compute in bfloat16, this run in float32)"),
    ((9, 0), (FA3, FA2), {}, SPLIT, f"flex ({CANNOT_SPLIT})"),
    ((9, 0), (FA3,), {}, SPLIT._replace(sequence_length=384),
     f"sdpa ({CANNOT_SPLIT}; {NEEDS} sequences have 384 tokens)"),
    ((9, 0), (FA3,), {}, SPLIT._replace(sequence_length=None),
     f"sdpa ({CANNOT_SPLIT}; {NEEDS} rows differ in length)"),
    ((8, 0), (), {}, BFLOAT16._replace(head_dim=20), f"flex ({HEADS} 20)"),
    ((8, 0), (FA2,), {}, BFLOAT16._replace(head_dim=512), f"flex ({HEADS} 512)"),
    ((8, 0), (), {}, BFLOAT16._replace(head_dim=12),
     f"sdpa ({HEADS} 12; FlexAttention has heads of at least 16, this model of 12)"),
]  # fmt: skip


@pytest.mark.parametrize(("capability", "installed", "torch_has", "setting", "says"), CASES)
def test_auto_takes_the_best_backend_and_says_why_in_one_line(
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int] | None,
    installed: Collection[str],
    torch_has: dict[str, Any],
    setting: Setting,
    says: str,
) -> None:
    with machine(capability, installed, **torch_has), caplog.at_level("INFO"):
        choice = resolve_backend("auto", setting)
        newer = current_flash_attention_impl()
    assert str(choice) == says
    assert [record.getMessage() for record in caplog.records] == [f"attention backend: {says}"]
    assert newer == (
        "FA3" if "FlashAttention 3 on" in says else "FA4" if "FlashAttention 4 on" in says else None
    )


@given(
    st.sampled_from([None, (7, 5), (8, 0), (9, 0), (10, 0), (12, 0)]),
    st.sets(st.sampled_from([FA3, FA4, FA2])),
    st.booleans(),
    st.booleans(),
    st.builds(
        Setting,
        st.sampled_from(["bfloat16", "float32"]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([8, 12, 16, 64, 128, 512]),
        st.sampled_from([None, 384, 512, 4096]),
    ),
)
def test_auto_takes_the_first_backend_that_is_not_refused_when_it_is_requested(
    capability: tuple[int, int] | None, installed: set[str], works: bool, own: bool, setting: Setting
) -> None:
    with machine(capability, installed, works=works, own=own):
        chosen = resolve_backend("auto", setting)
        for name in BACKENDS[: BACKENDS.index(chosen.backend)]:
            with pytest.raises(AttentionBackendError) as refused:
                resolve_backend(name, setting)
            reason = str(refused.value).split("cannot run here: ")[1].rsplit("; use ", 1)[0]
            assert reason in chosen.reason
        assert resolve_backend(chosen.backend, setting).backend == chosen.backend


@pytest.mark.parametrize(
    ("requested", "capability", "setting", "reason", "use"),
    [
        ("flash", None, BFLOAT16, NO_GPU, "sdpa"),
        ("flex", None, BFLOAT16, NO_GPU, "sdpa"),
        ("flash", (9, 0), BFLOAT16, NO_FLASH, "varlen, flex, sdpa"),
        ("flex", (9, 0), SPLIT._replace(sequence_length=384), f"{NEEDS} sequences have 384 tokens", "sdpa"),
        ("varlen", (9, 0), SPLIT, CANNOT_SPLIT, "flex, sdpa"),
        ("varlen", (9, 0), BFLOAT16._replace(param_dtype="float32"),
         "the variable-length kernels compute in bfloat16, this run in float32", "flex, sdpa"),
        ("flex", (9, 0), BFLOAT16._replace(earlier_keys=True),
         "its masks have no keys of earlier steps of the layer schedule", "sdpa"),
        ("eager", (9, 0), BFLOAT16, "there is no such backend (known: varlen, flash, flex, sdpa)",
         "varlen, flex, sdpa"),
    ],
)  # fmt: skip
def test_a_backend_that_cannot_run_is_refused_with_the_reason_and_what_can(
    requested: str, capability: tuple[int, int] | None, setting: Setting, reason: str, use: str
) -> None:
    with machine(capability), pytest.raises(AttentionBackendError) as refused:
        resolve_backend(requested, setting)
    assert str(refused.value) == (
        f"attention backend {requested!r} cannot run here: {reason}; use {use} or auto"
    )


def test_the_layers_run_the_flash_attention_that_was_chosen() -> None:
    """torchtitan's own constructor fails where the newest is not installed."""
    offsets = document_offsets(torch.tensor([[0, 1, 2, 0], [5, 6, 0, 1]]))
    q, kv = torch.empty(2, 4, 4, 16, device="meta"), torch.empty(2, 4, 2, 16, device="meta")
    for installed, expected in (((), None), ((FA3,), "FA3")):
        with machine((9, 0), installed):
            choice = resolve_backend("auto", BFLOAT16._replace(head_dim=16))
            layers = [inner_attention(choice.backend).build() for _ in range(2)]
            assert current_flash_attention_impl() == expected
            for layer in layers:
                out = layer(q, kv, kv, attention_masks=offsets, enable_gqa=True)
                assert (out.shape, out.dtype) == (q.shape, q.dtype)


def test_nothing_is_activated_for_another_backend() -> None:
    with machine((9, 0), (FA3,)):
        resolve_backend("flex", BFLOAT16)
        assert current_flash_attention_impl() is None


def shapes_of_recipes() -> set[tuple[int, int, int]]:
    """Heads, key heads and their dimension, of all models in shipped recipes."""
    models = [
        model
        for recipe in RECIPES.glob("*.yaml")
        for stage in load(recipe).stages.values()
        if isinstance(model := getattr(stage, "model", None), ModelSpec)
    ]
    return {(model.n_heads, model.n_kv_heads, model.head_dim) for model in models}


QUICK = {(3, 1, 32), (32, 8, 128)}  # the miniature and the 8B


@pytest.mark.skipif(not fake_cuda.possible(), reason=f"no {fake_cuda.COMPILER}, which compiles the fake CUDA")
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_backend_trains_heads_of_every_recipe_on_a_fake_gpu_or_is_refused(quick: bool) -> None:
    """With borders of documents inside of rows, and a row that begins inside of one."""
    all_shapes = shapes_of_recipes()
    assert {*QUICK, (64, 8, 128), (12, 12, 64)} <= all_shapes
    shapes = sorted(QUICK if quick else all_shapes - QUICK)
    script = Path(__file__).with_name("attention_on_fake_cuda.py")
    run = subprocess.run(
        [sys.executable, str(script), json.dumps(shapes)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for heads, kv_heads, head_dim in shapes:
        for backend in BACKENDS:
            case = f"{heads}/{kv_heads} x {head_dim}"
            whole, split = (found.pop(f"{backend}, cp {cp}, {case}") for cp in (1, 2))
            assert whole == "cuda [2, 256, 128] []"
            if backend in ("flex", "sdpa"):
                assert split == "cuda [2, 128, 128] []"
            else:
                assert CANNOT_SPLIT in split
    for backend, method in product(BACKENDS, ("hash", "drop")):
        sparse = found.pop(f"{backend}, {method}")
        if backend in ("flex", "sdpa"):
            assert sparse == "cuda [2, 256, 128] []"
        else:
            assert "the heads of this model choose keys" in sparse
    assert not found
