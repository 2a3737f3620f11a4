"""Loading from a committed checkpoint: what is used was compared with its digest, and no more is read or
held than is needed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import LoadPlan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from apertus_model.trainer import checkpoint_reader
from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.checkpoint_reader import CheckpointReader
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from infra.store import Checkpoint, Store
from infra.store.records import DamagedCheckpoint
from tests.infra.integrity import attempt

PIECE = 2**12


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store"))
    return Store(opened.fs, opened.root, piece_bytes=PIECE)


@pytest.fixture
def committed(store: Store, tmp_path: Path) -> Callable[..., Checkpoint]:
    """`committed(state)`: a checkpoint of step 7 with these tensors."""

    def commit(state: dict[str, torch.Tensor]) -> Checkpoint:
        writing = attempt(store, tmp_path)
        storage = CheckpointWriter(store, writing.folder(writing.checkpoint_folder(7)))
        dcp.save(state, storage_writer=storage, no_dist=True)
        return writing.commit_checkpoint(7, {}, files=storage.records)

    return commit


def random_state() -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.randn(70, 90),
        "rounded": torch.randn(3, 5, 7).bfloat16(),
        "half": torch.randn(9).half(),
        "exact": torch.randn(4, 1, dtype=torch.float64),
        "step": torch.tensor(7),
        "counts": torch.arange(5, dtype=torch.int32),
        "mask": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4),
    }


@pytest.mark.parametrize("block_bytes", [700, 2**24])
def test_what_was_stored_is_loaded_wherever_blocks_end(
    committed: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint_reader, "FETCH_BYTES", block_bytes)
    state = random_state()
    checkpoint = committed(state)
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load_tensors(loaded, checkpoint)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    # another order, another type
    transposed = {"matrix": torch.empty(90, 70).t(), "exact": torch.empty(4, 1)}
    load_tensors(transposed, checkpoint)
    assert torch.equal(transposed["matrix"], state["matrix"])
    assert torch.equal(transposed["exact"], state["exact"].float())


def test_other_programs_read_the_files(committed: Callable[..., Checkpoint], store: Store) -> None:
    state = random_state()
    folder = store.full(committed(state).folder)
    found = load_file(f"{folder}/rank-00000.safetensors")
    assert found.keys() == state.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in state.items()
    )
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_a_header_that_is_longer_than_the_first_read_is_read_whole(
    committed: Callable[..., Checkpoint],
) -> None:
    state = {f"layers.{number}.a_rather_long_name": torch.full((3,), float(number)) for number in range(200)}
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load_tensors(loaded, committed(state))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def flip(store: Store, path: str, place: int) -> None:
    file = Path(store.full(path))
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_a_flipped_bit_in_any_file_is_refused_by_the_loader(
    committed: Callable[..., Checkpoint], store: Store, place: float
) -> None:
    state = {"first": torch.randn(64, 64), "second": torch.randn(200), "step": torch.tensor(7)}
    checkpoint = committed(state)
    assert checkpoint.files.keys() == {"rank-00000.safetensors", "index.json"}
    for name, record in checkpoint.files.items():
        at = int(record.size * place) if place >= 0 else record.size - 1
        flip(store, f"{checkpoint.folder}/{name}", at)
        with pytest.raises(DamagedCheckpoint, match="damaged") as caught:
            load_tensors({key: torch.zeros_like(tensor) for key, tensor in state.items()}, checkpoint)
        assert (caught.value.artifact, caught.value.step) == ("pretrain/f", 7)
        flip(store, f"{checkpoint.folder}/{name}", at)
    load_tensors(state, checkpoint)


def test_a_file_that_the_marker_does_not_name_is_not_read(committed: Callable[..., Checkpoint]) -> None:
    checkpoint = committed({"weight": torch.randn(8)})
    del checkpoint.files["rank-00000.safetensors"]
    with pytest.raises(DamagedCheckpoint, match=r"has no file 'rank-00000\.safetensors'; it has index\.json"):
        load_tensors({"weight": torch.empty(8)}, checkpoint)


def read_part(
    checkpoint: Checkpoint, name: str, begin: tuple[int, int], lengths: tuple[int, int]
) -> torch.Tensor:
    """Rows and columns of a stored matrix, as DCP asks for them when another layout is loaded."""
    zero = torch.Size([0, 0])
    item = ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(name, zero),
        zero,
        MetadataIndex(name, zero),
        torch.Size(begin),
        torch.Size(lengths),
    )
    target = torch.zeros(lengths)
    planner: Any = SimpleNamespace(
        resolve_tensor=lambda item: target, commit_tensor=lambda item, tensor: None
    )
    CheckpointReader(checkpoint).read_data(LoadPlan([item]), planner).wait()
    return target


def test_reading_a_part_of_a_tensor_fetches_only_its_pieces(
    committed: Callable[..., Checkpoint], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader, "GAP", 0)
    state = {"before": torch.randn(256, 256), "matrix": torch.randn(256, 256), "after": torch.randn(256, 256)}
    checkpoint = committed(state)
    read: list[tuple[int, int]] = []
    read_range = Store.read_range

    def count(self: Store, path: str, start: int, stop: int) -> bytes:
        if path.endswith(".safetensors"):
            read.append((start, stop))
        return read_range(self, path, start, stop)

    monkeypatch.setattr(Store, "read_range", count)
    rows = read_part(checkpoint, "matrix", (64, 0), (32, 256))
    assert torch.equal(rows, state["matrix"][64:96])
    assert all(begin % PIECE == 0 for begin, _ in read)
    # those of the head, and at the ends, in part
    assert sum(end - begin for begin, end in read) <= rows.nbytes + 5 * PIECE
    columns = read_part(checkpoint, "matrix", (200, 16), (8, 32))
    assert torch.equal(columns, state["matrix"][200:208, 16:48])


def test_what_is_held_beside_the_tensors_does_not_grow_with_the_file(
    committed: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader, "FETCH_BYTES", 2**18)
    state = {"large": torch.randn(2**22), "small": torch.randn(10)}  # 16 MiB
    checkpoint = committed(state)
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load_tensors({"small": loaded["small"]}, checkpoint)  # imports
    tracemalloc.start()
    try:
        load_tensors(loaded, checkpoint)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20
    assert torch.equal(loaded["large"], state["large"])
