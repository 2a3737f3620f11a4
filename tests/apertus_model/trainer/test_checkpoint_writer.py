"""A checkpoint is written beside training, whole or not at all."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from apertus_model.trainer.checkpoint import raise_cause
from apertus_model.trainer.checkpoint_writer import CheckpointWriter, Staging
from infra.store import Store
from infra.store.records import FileRecord
from tests.apertus_model.harness import segment, train

SLEEP = 2.0


@pytest.mark.parametrize("value", [0.1, torch.ones(2, dtype=torch.complex64)])
def test_a_checkpoint_with_anything_but_tensors_of_known_types_is_not_written(
    tmp_path: Path, value: Any
) -> None:
    writer = CheckpointWriter(Store.open(str(tmp_path)), "checkpoint")
    with (
        pytest.raises(
            TypeError,
            match=r"'settings.value' is not a tensor of a type that checkpoints can hold \(bfloat16, bool, ",
        ),
        raise_cause(),
    ):
        dcp.save({"weight": torch.ones(2), "settings": {"value": value}}, storage_writer=writer, no_dist=True)
    assert not list(tmp_path.rglob("*.*"))


class SlowStore(Store):
    """Takes two seconds for every file."""

    def writer(self, path: str) -> Any:
        time.sleep(SLEEP)
        return super().writer(path)


class FailingStore(Store):
    """Has no room for the file of rank 1, or of the only one."""

    def writer(self, path: str) -> Any:
        if path.endswith(f"rank-{int(os.environ['WORLD_SIZE']) - 1:05d}.safetensors"):
            raise OSError(28, "No space left on device")
        return super().writer(path)


@pytest.mark.slow
def test_training_continues_while_a_checkpoint_is_written_and_the_next_save_waits_for_it(
    tmp_path: Path,
) -> None:
    result = train(tmp_path, segment(), storage=SlowStore.open)[0]
    first, second = result.saved[3], result.saved[6]
    assert first.upload_seconds >= 2 * SLEEP  # a shard and the index
    assert first.stall_seconds < SLEEP
    # three steps, in less time than the writing took
    assert result.rows[5]["time"] - result.rows[2]["time"] < 2 * SLEEP
    assert second.stall_seconds > 0.5  # one at most is in flight
    assert result.committed == [3, 6]  # the last one too, before the run was over
    assert first.bytes == sum(path.stat().st_size for path in (tmp_path / "step-3").iterdir())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_save_that_fails_ends_the_run_on_all_ranks_with_the_reason(tmp_path: Path, processes: int) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"UploadError: the checkpoint of step 3 was not stored: OSError: .*No space left on device",
    ):
        # at the next step, not at the end
        train(tmp_path, segment(end_step=5000), processes=processes, storage=FailingStore.open)
    assert not (tmp_path / "step-3" / "index.json").exists()


def test_records_of_all_ranks_are_those_of_the_files_and_equal_states_have_equal_bytes(
    tmp_path: Path,
) -> None:
    runs = [train(tmp_path / name, segment(end_step=3), processes=2)[0] for name in ("one", "other")]
    records = runs[0].saved[3].files
    found = {path.name: path.read_bytes() for path in (tmp_path / "one" / "step-3").iterdir()}
    assert records == {
        name: FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in found.items()
    }
    assert found.keys() == {"rank-00000.safetensors", "rank-00001.safetensors", "index.json"}
    assert records == runs[1].saved[3].files
    assert not any(str(tmp_path).encode() in data for data in found.values())


def test_staging_keeps_one_copy_and_reuses_it() -> None:
    staging, weight = Staging(), torch.arange(6.0).reshape(2, 3).t()
    first = staging.copy({"weight": weight, "step": torch.tensor(3)})
    weight += 1
    assert torch.equal(first["weight"], weight - 1)
    second = staging.copy({"weight": weight, "step": torch.tensor(4)})
    assert torch.equal(second["weight"], weight)
    assert second["weight"].data_ptr() == first["weight"].data_ptr()
    assert second["weight"].is_contiguous()
