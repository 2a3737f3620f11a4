"""torchtitan's calls of a newer torch."""

import subprocess
import sys

from apertus_model.model.older_torch import OLDER_TORCH, without


def test_arguments_that_an_older_torch_does_not_take_are_left_out() -> None:
    assert without(lambda *args, **options: (args, options), "new")(1, old=2, new=3) == ((1,), {"old": 2})


def test_the_pinned_torch_is_new_enough() -> None:
    assert not OLDER_TORCH


def test_torchtitan_is_prepared_whichever_package_is_imported_first() -> None:
    """The pinned torch without the name that it has since 2.13, and with an older version."""
    older = "import torch; torch.__version__ = type(torch.__version__)('2.11.0'); "
    without_name = "from torch.distributed import fsdp; del fsdp.DataParallelMeshDims; "
    program = older + without_name + "import apertus_model.{}"
    for module in ("trainer.trainer", "model.model"):
        asked = [sys.executable, "-c", program.format(module)]
        assert subprocess.run(asked, capture_output=True, timeout=300).returncode == 0
