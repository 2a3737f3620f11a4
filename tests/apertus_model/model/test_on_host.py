"""Arguments that stay in the host's memory."""

import torch
from torch.utils._pytree import tree_map_only

from apertus_model.model.on_host import OnHost, copy_to, host_tensor


def test_a_tensor_on_the_host_is_no_tensor_to_others_and_is_split_with_its_batch() -> None:
    labels = torch.arange(6).view(2, 3)
    value = OnHost(labels)
    assert not isinstance(value, torch.Tensor)
    first = tree_map_only(torch.Tensor, lambda tensor: tensor[:1], {"labels": value})["labels"]
    assert isinstance(first, OnHost)
    assert torch.equal(first.tensor, labels[:1])


def test_the_tensor_is_the_same_wherever_it_is_asked_for() -> None:
    labels = torch.arange(6)
    assert host_tensor(OnHost(labels)) is labels
    assert host_tensor(labels) is labels
    assert torch.equal(copy_to(OnHost(labels), torch.device("cpu")), labels)
