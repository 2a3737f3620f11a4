"""xIELU as an operator: what torch needs of one, and what each rank computes of a split tensor. Elsewhere
than on a GPU it computes the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from apertus_model.model.feed_forward import XIELU
from apertus_model.model.xielu import xielu
from tests.apertus_model.model.formulas import Tensors
from tests.apertus_model.ranks import in_processes


def inputs(*shape: int, seed: int = 0) -> list[torch.Tensor]:
    """x, alpha_p and alpha_n in float64, which want gradients."""
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    alphas = (torch.tensor([value], dtype=torch.float64) for value in (0.3, -0.7))
    return [tensor.requires_grad_() for tensor in (x, *alphas)]


def gradients(call: Any, tensors: list[torch.Tensor]) -> Tensors:
    """Value of `call`, and gradients of its sum weighted by 1, 2, 3, ..."""
    value = call(*tensors)
    weights = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).view(value.shape)
    return value, *torch.autograd.grad((value * weights).sum(), tensors)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3, 5)])
def test_torch_finds_no_fault_with_the_operator(shape: tuple[int, ...]) -> None:
    torch.library.opcheck(xielu, tuple(inputs(*shape)))


def test_the_operator_computes_what_the_module_does() -> None:
    module = XIELU(XIELU.Config()).double()
    x, alpha_p, alpha_n = inputs(4, 9)
    with torch.no_grad():
        module.alpha_p.copy_(alpha_p)
        module.alpha_n.copy_(alpha_n)
    expected = gradients(lambda *_: module(x), [x, module.alpha_p, module.alpha_n])
    torch.testing.assert_close(gradients(xielu, [x, alpha_p, alpha_n]), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("policy", [None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_recomputation_gives_the_same_gradients(policy: CheckpointPolicy | None) -> None:
    tensors = inputs(4, 9)
    options: dict[str, Any] = {}
    if policy is not None:
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(
            lambda ctx, op, *args, **kwargs: (
                policy if op is torch.ops.apertus.xielu.default else CheckpointPolicy.PREFER_RECOMPUTE
            )
        )

    def twice(x: torch.Tensor, *alphas: torch.Tensor) -> torch.Tensor:
        return xielu(xielu(x, *alphas), *alphas)

    again = gradients(lambda *args: checkpoint(twice, *args, use_reentrant=False, **options), tensors)
    assert all(torch.equal(a, b) for a, b in zip(again, gradients(twice, tensors), strict=True))


def test_a_traced_function_calls_it_whole() -> None:
    def twice(x: torch.Tensor, *alphas: torch.Tensor) -> torch.Tensor:
        return xielu(xielu(2 * x, *alphas), *alphas)

    tensors = inputs(4, 9)
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled, tensors), gradients(twice, tensors))


def test_each_rank_has_its_part_of_a_split_tensor_and_of_the_gradients_of_the_scalars(tmp_path: Path) -> None:
    expected = gradients(xielu, inputs(2, 4, 6))

    def work(rank: int) -> list[Any]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        found: list[Any] = []
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            x, *alphas = inputs(2, 4, 6)
            split = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
            whole = [
                distribute_tensor(alpha.detach(), mesh, [Replicate()]).requires_grad_() for alpha in alphas
            ]
            weights = torch.arange(1.0, 49, dtype=torch.float64).view(2, 4, 6)
            value = xielu(split, *whole)
            assert isinstance(value, DTensor) and value.placements == (placement,)
            value.backward(distribute_tensor(weights, mesh, [placement]))
            part = Replicate() if placement == Replicate() else Partial()
            assert split.grad.placements == (placement,)
            assert [alpha.grad.placements for alpha in whole] == [(part,), (part,)]
            found.append([tensor.full_tensor() for tensor in (value, split.grad, *(a.grad for a in whole))])
        dist.destroy_process_group()
        return found

    for results in in_processes(tmp_path, work, 2):
        for result in results:
            torch.testing.assert_close([one.detach() for one in result], [one.detach() for one in expected])
