"""Exchanges between the ranks of a group, in the forms that models, losses and evaluations need."""

import torch
import torch.distributed as dist


def gathered(own: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> torch.Tensor:
    """The tensors of all ranks of a group, of one shape, joined along `dim` in the order of the ranks."""
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, dim)


def of_first_rank(answer: bool, device: torch.device) -> bool:
    """The answer of rank 0, on every rank."""
    number = torch.tensor(int(answer), device=device)
    dist.broadcast(number, src=0)
    return bool(number)
