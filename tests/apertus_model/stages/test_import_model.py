"""A Hugging Face folder becomes a checkpoint, which is exported again; what the model card says of where
it came from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from apertus_model.chat import template
from apertus_model.stages import export
from infra.store import Artifact, DamagedError, hugging_face
from specs.hugging_face import HuggingFaceError, hugging_face_config, older_rope
from specs.job import InputRef
from specs.model import ModelSpec
from specs.stages.export import ExportPart
from specs.stages.hugging_face import ImportModelPart
from tests.infra.faults import flip_what_is_written
from tests.jobs import checkpoint_at, input_at

SPEC = ModelSpec(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    vocab_size=515,  # no multiple of anything
    rope_theta=12e6,
    init_std=0.02,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A released model: bfloat16, as transformers saves it."""
    from transformers import ApertusConfig, ApertusForCausalLM

    torch.manual_seed(3)
    config = ApertusConfig(
        **hugging_face_config(
            SPEC, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=10
        )
    )
    ApertusForCausalLM(config).to(torch.bfloat16).save_pretrained(
        tmp_path / "released", max_shard_size=30_000
    )
    return tmp_path / "released"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine describes a single process in the environment."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


def run(bench: Any, kind: str, spec: BaseModel, **inputs: InputRef) -> Artifact:
    artifact: Artifact = bench.run(kind, kind, spec.model_dump(mode="json"), inputs, launch={"threads": 1})
    return artifact


def part_of(folder: Path, **fields: Any) -> ImportModelPart:
    return ImportModelPart(
        model=SPEC, url=str(folder), reference="some|one/model", license="apache-2.0", **fields
    )


@pytest.mark.parametrize("shard", [30_000, 5_000_000_000])
def test_a_released_model_comes_out_of_the_store_as_it_went_in(
    bench: Any, tokenizer: Artifact, folder: Path, shard: int
) -> None:
    imported = run(bench, "import_model", part_of(folder))
    checkpoint = imported.checkpoint(1)
    assert checkpoint.facts == {"tokens": 0, "passes": {}}
    spec = ExportPart(model=SPEC, sequence_length=64, max_shard_size=shard, dtype="bfloat16", tolerance=1e-4)
    read = checkpoint_at(imported, 1).model_copy(update={"name": "it"})
    exported = run(bench, "export", spec, checkpoint=read, tokenizer=input_at(tokenizer.path))
    if shard == 30_000:
        rewritten = ("config.json", "generation_config.json")
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in rewritten}
        assert {name: exported.bytes(name) for name in before} == before
        assert len(before) > 3
        config = json.loads((folder / "config.json").read_text())
        assert exported.json("config.json") == config | older_rope(config["rope_parameters"])
    metrics = exported.manifest.metrics
    assert metrics["logit_difference"] < 1e-5
    assert metrics["verified"] == (
        "every weight bit by bit, logits layer by layer" if shard == 30_000 else "opened as a whole"
    )
    card = exported.bytes("README.md").decode()
    assert "beginning with hf:some\\|one/model (licence: apache-2.0); context of 64 tokens" in card
    assert "| import_model | weights of another model |" in card


def test_planner_and_chat_template_know_the_same_end_of_a_turn() -> None:
    assert hugging_face.END_OF_TURN == template.END_OF_TURN


def test_a_folder_without_the_weights_of_its_config_leaves_nothing(bench: Any, folder: Path) -> None:
    other = part_of(folder).model_copy(update={"model": SPEC.model_copy(update={"ffn_dim": 128})})
    with pytest.raises(
        HuggingFaceError, match=r"down_proj.weight' of .* has shape \(32, 64\), config.json says \(32, 128\)"
    ):
        run(bench, "import_model", other)
    assert Artifact(bench.store, "import_model/import_model").checkpoint_steps() == []


def test_a_bit_that_the_disk_changes_is_not_sealed_in(
    bench: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_what_is_written(monkeypatch)
    imported = run(bench, "import_model", part_of(folder))
    with pytest.raises(DamagedError, match="differs from the digest"):
        imported.checkpoint(1).check()


def test_a_weight_that_is_not_the_trained_one_is_refused(
    bench: Any, tokenizer: Artifact, folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    imported = run(bench, "import_model", part_of(folder))
    checkpoint = imported.checkpoint(1)
    spec = ExportPart(model=SPEC, sequence_length=64, max_shard_size=30_000, dtype="bfloat16", tolerance=1e-4)
    export.write_folder(checkpoint, spec, tokenizer, tmp_path / "out")
    assert export.compare_by_layer(checkpoint, tmp_path / "out", spec) < 1e-5
    file = next(
        path
        for path in sorted((tmp_path / "out").glob("*.safetensors"))
        if "model.norm.weight" in load_file(path)
    )
    tensors = load_file(file)
    tensors["model.norm.weight"][5] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        export.ExportError, match=r"'norm\.weight' of the exported folder is not the trained weight"
    ):
        export.compare_by_layer(checkpoint, tmp_path / "out", spec)
