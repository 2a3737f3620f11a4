"""Which models FSDP surrounds. What it computes is tested with every layout in `test_layouts.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from specs.settings import Precision
from tests.apertus_model.harness import segment, train


@pytest.mark.parametrize(
    ("param", "processes", "surrounded"),
    [("float32", 1, False), ("bfloat16", 1, False), ("float32", 2, True)],
)
def test_one_process_has_no_fsdp(tmp_path: Path, param: Any, processes: int, surrounded: bool) -> None:
    def check(trainer: Any) -> None:
        (model,) = trainer.model_parts
        assert any(isinstance(module, FSDPModule) for module in model.modules()) == surrounded

    train(tmp_path, segment(end_step=1, precision=Precision(param=param)), processes=processes, inspect=check)
