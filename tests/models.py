"""Folders as those of Hugging Face models, without weights; FLOPs by the formula of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specs.hugging_face import hugging_face_config
from specs.model import ModelSpec

MODEL = ModelSpec(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=64, vocab_size=512)


def model_folder(target: Path, *, eos: int = 2, **changes: Any) -> Path:
    """What a Hugging Face folder looks like from outside."""
    target.mkdir(parents=True)
    config = hugging_face_config(MODEL, max_position_embeddings=128, bos_token_id=1, eos_token_id=eos)
    document = config | {"model_type": "apertus", "architectures": ["ApertusForCausalLM"]} | changes
    (target / "config.json").write_text(json.dumps(document))
    (target / "model-00001-of-00002.safetensors").write_bytes(b"one")
    (target / "model-00002-of-00002.safetensors").write_bytes(b"two")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 68, "content": "<|assistant_end|>"}]})
    )
    (target / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (target / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [de, rm]\n---\n# A model\n")
    return target


def other_model_folder(target: Path, *, template: bool = True, **changes: Any) -> Path:
    """The same of a model of another architecture, with a chat template."""
    model_folder(target)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 256,
        "eos_token_id": [1, 2],
    }
    (target / "config.json").write_text(json.dumps(config | changes))
    (target / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 1, "content": "<|eot_id|>"}]}))
    if template:
        (target / "chat_template.jinja").write_text("{{ messages }}")
    return target


def flops_per_token(model: ModelSpec, sequence_length: int) -> int:
    """Training FLOPs per token: 3 x forward, 2 per multiply-add, full (not halved) attention scores (Apertus
    report, appendix E)."""
    layers = model.layer_runs * model.layer_matrices + model.score_runs * int(model.scores(sequence_length))
    mixing = model.mamba_matrices + model.mamba_products(sequence_length)
    layers += len(model.mamba_layers) * mixing
    return 3 * 2 * (layers + (model.sum_weights + model.outputs) * model.dim)
