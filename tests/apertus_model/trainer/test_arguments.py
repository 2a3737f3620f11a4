"""What a rank's model takes of whole rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from apertus_model.model.on_host import OnHost
from apertus_model.trainer.loader import model_arguments
from tests.apertus_model.ranks import in_processes

ROWS = torch.arange(32).view(2, 16)
CPU = torch.device("cpu")


def test_a_rank_that_shares_no_sequence_takes_whole_rows_and_labels_stay_on_the_host() -> None:
    dims: Any = SimpleNamespace(cp_enabled=False)
    tokens, labels, arguments = model_arguments(None, dims, CPU, ROWS, ROWS + 1, ROWS + 2)
    assert torch.equal(tokens, ROWS)
    assert isinstance(labels, OnHost) and torch.equal(labels.tensor, ROWS + 2)
    assert isinstance(arguments["positions"], OnHost)
    assert torch.equal(arguments["positions"].tensor, ROWS + 1)


@pytest.mark.parametrize("balancer", [None, "headtail"])
def test_ranks_that_share_sequences_split_labels_as_tokens(balancer: str | None, tmp_path: Path) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        dims: Any = SimpleNamespace(cp_enabled=True, get_mesh=lambda name: mesh)
        model = SimpleNamespace(cp_mesh=mesh, cp_load_balancer=balancer)
        tokens, labels, arguments = model_arguments(model, dims, CPU, ROWS, ROWS, ROWS)
        return [tokens, labels.tensor, arguments["positions"]]

    parts = in_processes(tmp_path, work, 2)
    for tokens, labels, positions in parts:
        assert torch.equal(labels, tokens) and torch.equal(positions, tokens)
    assert parts[0][0][0, :4].tolist() == [0, 1, 2, 3]
    places = torch.cat([tokens for tokens, _, _ in parts], dim=1)
    assert torch.equal(places.sort(dim=1).values, ROWS)
    assert (parts[0][0][0, -1].item() == 15) == (balancer == "headtail")
