"""The rotary embedding as an operator: what torch needs of one, and what each rank computes of its heads.
Elsewhere than on a GPU it computes the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from apertus_model.model.rotation import Llama3RoPE, rotate
from tests.apertus_model.model.formulas import rotated_in_float64, table
from tests.apertus_model.ranks import in_processes


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_finds_no_fault_with_the_operator(dtype: torch.dtype, back: bool) -> None:
    x = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_()
    torch.library.opcheck(rotate, (x, table(1, 5, 4), back))


@pytest.mark.parametrize("batch", [1, 3], ids=["a table for all rows", "one for each"])
def test_it_is_what_torchtitan_computes_and_its_gradient(batch: int) -> None:
    query, key = torch.randn(3, 7, 4, 16).requires_grad_(), torch.randn(3, 7, 2, 16).requires_grad_()
    rows = table(batch, 7, 8)
    weights = torch.randn(3, 7, 4, 16), torch.randn(3, 7, 2, 16)
    results = []
    for found in (
        Llama3RoPE.apply_rotary_emb(query, key, rows),
        (rotate(query, rows, False), rotate(key, rows, False)),
    ):
        results.append([*found, *torch.autograd.grad(found, (query, key), weights)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)


def test_rotated_back_is_what_it_was() -> None:
    x, rows = torch.randn(2, 5, 3, 8), table(2, 5, 4)
    torch.testing.assert_close(rotate(rotate(x, rows, False), rows, True), x, rtol=0, atol=1e-6)


def test_each_rank_rotates_its_heads(tmp_path: Path) -> None:
    x, rows = torch.randn(2, 5, 4, 8), table(1, 5, 4)
    expected = rotated_in_float64(x, rows, False).float()

    def work(rank: int) -> list[Any]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        found: list[Any] = []
        for placement in (Shard(2), Replicate()):
            heads = distribute_tensor(x, mesh, [placement]).requires_grad_()
            turned = rotate(heads, distribute_tensor(rows, mesh, [Replicate()]), False)
            assert isinstance(turned, DTensor) and turned.placements == (placement,)
            turned.backward(turned.detach())
            assert heads.grad.placements == (placement,)
            found.append([turned.detach().full_tensor(), heads.grad.full_tensor()])
        dist.destroy_process_group()
        return found

    for results in in_processes(tmp_path, work, 2):
        for result in results:
            torch.testing.assert_close(result, [expected, x], rtol=0, atol=1e-5)
