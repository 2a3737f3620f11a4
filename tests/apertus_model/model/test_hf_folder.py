"""Weights to a Hugging Face folder and from it: the very files that transformers writes, bit by bit, a
shard at a time."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from apertus_model.model.hf_folder import INDEX, FolderWeights, write_shards
from apertus_model.model.model import shapes
from apertus_model.stages.import_model import save_weights
from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from infra.store import Store
from specs.hugging_face import HuggingFaceError, hugging_face_config
from specs.model import ModelSpec
from specs.stages.hugging_face import ImportModelPart
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint
from tests.numerics import Numerics, largest_difference

SPEC = ModelSpec(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=64, vocab_size=259)
SHARD = 15_000  # bytes: several shards, also in bfloat16
ROOT = Path(__file__).resolve().parents[3]


def their_model(dtype: str = "float32", *, meta: bool = False) -> Any:
    from transformers import ApertusConfig, ApertusForCausalLM

    config = ApertusConfig(
        **hugging_face_config(SPEC, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, dtype=dtype)
    )
    with torch.device("meta" if meta else "cpu"):
        return ApertusForCausalLM(config)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of theirs with random weights everywhere, as transformers saves it."""
    target: Path = tmp_path_factory.mktemp("theirs") / request.param
    theirs = their_model(request.param)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    theirs.to(getattr(torch, request.param)).save_pretrained(target, max_shard_size=SHARD)
    return target


def into(target: Path) -> CheckpointWriter:
    return CheckpointWriter(Store.open(str(target.parent)), target.name)


def imported(folder: str, target: Path) -> Path:
    part = ImportModelPart(model=SPEC, url=folder, reference=folder)
    save_weights(
        FolderWeights(folder, SPEC, target.parent / "shards"),
        part,
        into(target),
        on_tensor=lambda done, total: None,
    )
    return target


def exported(checkpoint: Path, target: Path, dtype: str) -> Path:
    write_shards(
        their_model(dtype, meta=True),
        target,
        max_shard_size=SHARD,
        dtype=getattr(torch, dtype),
        fill=lambda tensors: load_tensors(tensors, LocalCheckpoint(checkpoint)),
    )
    return target


def weight_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("model*")}


def test_a_folder_goes_to_a_checkpoint_and_back_to_the_same_files(
    folder: Path, tmp_path: Path, numerics: Numerics
) -> None:
    back = exported(imported(str(folder), tmp_path / "checkpoint"), tmp_path / "back", folder.name)
    assert len(weight_files(folder)) > 5
    numerics(
        "model",
        f"bytes of shards and index, {folder.name}, from Hugging Face to a checkpoint and back",
        source="safetensors, transformers",
        against="the files of save_pretrained",
        difference=largest_difference(weight_files(back), weight_files(folder)),
        allowed=0.0,
    )


def test_a_remote_folder_is_read_like_a_local_one(folder: Path, tmp_path: Path) -> None:
    fsspec.filesystem("memory").put(str(folder), f"/{folder.name}-model", recursive=True)
    back = exported(
        imported(f"memory://{folder.name}-model", tmp_path / "checkpoint"), tmp_path / "back", folder.name
    )
    assert weight_files(back) == weight_files(folder)
    assert len(list((tmp_path / "shards").iterdir())) == 1  # the last one


def trained_checkpoint(target: Path, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes(SPEC).items()}
    dcp.save({**state, **more}, storage_writer=into(target), no_dist=True)
    return state


def test_a_checkpoint_goes_to_a_folder_and_back_to_the_same_weights(
    tmp_path: Path, numerics: Numerics
) -> None:
    trained = trained_checkpoint(tmp_path / "trained")
    imported(str(exported(tmp_path / "trained", tmp_path / "model", "float32")), tmp_path / "again")
    again = {name: torch.empty_like(weight) for name, weight in trained.items()}
    load_tensors(again, LocalCheckpoint(tmp_path / "again"))
    numerics(
        "model",
        "weights from a checkpoint to Hugging Face and back",
        source="names of ApertusForCausalLM, transformers",
        against="the checkpoint",
        difference=largest_difference(again, trained),
        allowed=0.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_into_its_weight_and_rounded_once(
    tmp_path: Path, dtype: torch.dtype, numerics: Numerics
) -> None:
    name = "layers.1.attention.wo"
    a, b = torch.randn(2, 32), torch.randn(32, 2)
    adapter = {
        f"{name}.lora_a.weight": a,
        f"{name}.lora_b.weight": b,
        f"{name}.lora_scale": torch.tensor(0.5),
    }
    trained = trained_checkpoint(tmp_path / "adapted", **adapter)
    exported(tmp_path / "adapted", tmp_path / "model", str(dtype).removeprefix("torch."))
    product = b[:, 0, None].double() * a[None, 0].double() + b[:, 1, None].double() * a[None, 1].double()
    merged = (trained[f"{name}.weight"].double() + 0.5 * product).float().to(dtype)
    weights = FolderWeights(str(tmp_path / "model"), SPEC, tmp_path)
    numerics(
        "model",
        f"weight with its adapter, merged at export, {str(dtype).removeprefix('torch.')}",
        source="W + s B A, arXiv 2106.09685",
        against="the sum written out in float64, rounded once",
        difference=largest_difference(weights[f"{name}.weight"], merged),
        allowed=0.0,
    )
    assert torch.equal(
        weights["layers.2.attention.wo.weight"], trained["layers.2.attention.wo.weight"].to(dtype)
    )


def broken(folder: Path, target: Path, change: Any) -> Path:
    shutil.copytree(folder, target)
    change(target)
    return target


def edit_tensor(name: str, tensor: torch.Tensor | None) -> Any:
    """Replaces a stored tensor, or takes it away."""

    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        file = folder / index["weight_map"][name]
        tensors = load_file(file)
        tensors.pop(name)
        index["weight_map"].pop(name)
        if tensor is not None:
            tensors[name] = tensor
            index["weight_map"][name] = file.name
        save_file(tensors, file, metadata={"format": "pt"})
        (folder / INDEX).write_text(json.dumps(index))

    return change


def edit_index(file: str) -> Any:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["lm_head.weight"] = file
        (folder / INDEX).write_text(json.dumps(index))

    return change


def only_pickles(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            edit_tensor("model.layers.1.mlp.act_fn.beta", torch.tensor(0.25)),
            r"beta is 0\.25, this model computes xIELU with 0\.5",
        ),
        (
            edit_tensor("model.norm.weight", torch.ones(16)),
            r"'model.norm.weight' .* has shape \(16,\), config.json says \(32,\)",
        ),
        *(
            (
                edit_tensor("model.norm.weight", torch.tensor([*[1.0] * 30, number, number])),
                r"'model.norm.weight' in model-\d+-of-\d+\.safetensors of .* has 2 values of 32 that are NaN",
            )
            for number in (float("nan"), float("inf"), -float("inf"))
        ),
        (edit_tensor("model.norm.weight", None), "lacks 1 of 39 weights, the first 'model.norm.weight'"),
        (edit_index("../model.safetensors"), "only safetensors in the folder itself are read"),
        (edit_index("pytorch_model.bin"), r"never pickles \(\.bin\)"),
        (only_pickles, r"never pickles \(\.bin\)"),
    ],
)
def test_a_folder_that_does_not_hold_the_model_is_refused(
    folder: Path, tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(HuggingFaceError, match=message):
        imported(str(broken(folder, tmp_path / "broken", change)), tmp_path / "checkpoint")


MEMORY = """
import gc
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from apertus_model.stages import export
from apertus_model.stages.import_model import save_weights
from apertus_model.model.hf_folder import FolderWeights
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from infra.store import Store
from specs.model import ModelSpec
from specs.stages.export import ExportPart
from specs.stages.hugging_face import ImportModelPart
from tests.apertus_model.trainer.checkpoints import LocalCheckpoint

class Tokenizer:
    manifest = SimpleNamespace(facts={"bos_id": 1, "eos_id": 2}, files={})

def memory(name):  # of this process, in bytes
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

def growth(work):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before

torch.set_num_threads(1)
folder, shard = Path(sys.argv[1]), int(sys.argv[2])

def work(spec, name):
    part = ExportPart(model=spec, sequence_length=32, max_shard_size=shard, tolerance=1e-4)
    imported = ImportModelPart(model=spec, url=str(folder / name), reference=name)
    checkpoint, again = LocalCheckpoint(folder / f"{name}-checkpoint"), folder / f"{name}-again"
    writer = CheckpointWriter(Store.open(str(folder)), f"{name}-checkpoint")
    weights = FolderWeights(imported.url, spec, folder)
    yield growth(lambda: save_weights(weights, imported, writer, on_tensor=lambda *_: None))
    yield growth(lambda: export.write_folder(checkpoint, part, Tokenizer(), again))
    yield growth(lambda: export.compare_by_layer(checkpoint, again, part))

list(work(ModelSpec(flavour="mini", n_layers=1), "small"))  # imports and buffers of libraries
print(*work(ModelSpec(flavour="mini", dim=512, ffn_dim=1280, n_layers=44), "large"))
"""


@pytest.mark.slow
def test_import_and_export_hold_no_more_than_one_shard(tmp_path: Path) -> None:
    from transformers import ApertusConfig, ApertusForCausalLM

    shard = 32 * 2**20
    for name, spec in (("small", ModelSpec(flavour="mini", n_layers=1)), ("large", LARGE)):
        config = ApertusConfig(
            **hugging_face_config(spec, max_position_embeddings=32, bos_token_id=1, eos_token_id=2)
        )
        with torch.device("meta"):
            theirs = ApertusForCausalLM(config)
        write_shards(theirs, tmp_path / name, max_shard_size=shard, dtype=torch.float32, fill=fill)
    assert LARGE.parameters * 4 > 7 * shard
    # what is freed goes back to the kernel at once
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    program = [sys.executable, "-c", MEMORY, str(tmp_path), str(shard)]
    done = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    importing, writing, comparing = (int(value) / shard for value in done.stdout.split())
    print(f"{importing:.2f} {writing:.2f} {comparing:.2f} shards")
    assert max(importing, writing, comparing) < 2.5, (importing, writing, comparing)
    assert writing > 0.9  # the shard itself; the measure can tell


LARGE = ModelSpec(flavour="mini", dim=512, ffn_dim=1280, n_layers=44)


def fill(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(0.01)
