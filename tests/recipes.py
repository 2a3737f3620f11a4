"""Recipes in memory for tests: a small pipeline over files that the test writes, and helpers to edit it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specs.errors import SpecError
from specs.recipe import load

RECIPE = """\
name: tiny
sources:
  notes: {{url: "{documents}", format: text, include: ["*.txt"]}}
stages:
  tokenizer: {{kind: tokenizer, sources: [notes], vocab_size: 512, bytes_per_source: 50_000}}
  corpus: {{kind: corpus, tokenizer: tokenizer, sources: {{notes: {{holdout: 0.2}}}}}}
  main: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100}}
  second: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100, seed: 29}}
  pretrain:
    kind: pretrain
    model: {{dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512}}
    mixture: {{0 steps: main, 8 steps: second}}
    sequence_length: 32
    global_batch_size: {{0 steps: 4, 12 steps: 8}}
    budget: 16 steps
    optimizer: {{lr: 1e-2, alpha_warmup: 10 steps, beta3_warmup: 10 steps, betas: [0.9, 0.99, 0.99]}}
    schedule: {{warmup: 4 steps}}
    precision: {{param: float32}}
    checkpoint: {{interval: 5, keep: 2}}
    validation: {{interval: 8, samples: 2}}
  cooldown:
    kind: cooldown
    from: pretrain
    mixture: main
    budget: 6 steps
    checkpoint: {{interval: 4}}
    validation: {{interval: 0}}
  evaluate:
    kind: evaluate
    from: cooldown
    sources: [corpus/notes]
    samples: 4
    gates: [{{metric: perplexity, max: 1000}}]
  export: {{kind: export, from: cooldown, after: [evaluate]}}
"""
CHAT = (
    RECIPE.replace(
        "sources:\n",
        'sources:\n  questions: {{url: "{documents}", format: chat, include: ["*.jsonl"]}}\n',
    )
    + """\
  longer:
    kind: long_context
    from: cooldown
    steps:
      - {{sequence_length: 64, rope_theta: 1e6, global_batch_size: 4, budget: 4 steps, mixture: main,
          schedule: {{warmup: 2 steps}}}}
      - {{sequence_length: 128, rope_theta: 2e6, global_batch_size: 2, budget: 3 steps, mixture: main}}
  chat: {{kind: conversations, tokenizer: tokenizer, sources: {{questions: {{holdout: 0.2}}}}}}
  sft:
    kind: sft
    from: longer
    conversations: chat
    global_batch_size: 4
    budget: 8 steps
    optimizer: {{lr: 1e-3, weight_decay: 0, grad_clip: 1.0}}
    checkpoint: {{interval: 2, keep: 1}}
    validation: {{interval: 2, samples: 2}}
  preferences:
    kind: preference_data
    from: sft
    prompts: [chat]
    completions: {{n: 4, max_new_tokens: 16}}
    reward: reference-overlap
  qrpo: {{kind: qrpo, from: sft, preferences: preferences, global_batch_size: 4, budget: 4 steps,
    optimizer: {{lr: 1e-4}}}}
  dpo: {{kind: dpo, from: sft, preferences: preferences, global_batch_size: 4, budget: 4 steps,
    optimizer: {{lr: 1e-4}}}}
  merged: {{kind: merge, checkpoints: [qrpo, dpo]}}
  evaluate-sft:
    kind: evaluate
    from: sft
    sources: [corpus/notes]
    generation: &answers {{prompts: chat, limit: 8, sampling: {{n: 1, max_new_tokens: 16}},
      reward: reference-overlap}}
  evaluate-qrpo: {{kind: evaluate, from: qrpo, sources: [corpus/notes], against: evaluate-sft,
    generation: *answers}}
  chat-model: {{kind: export, from: qrpo, evaluations: [evaluate-qrpo]}}
"""
)
CLUSTER = (
    "cluster={gpu: H100, gpus_per_node: 2, mfu: 0.5, price_per_gpu_hour: 3, power_per_gpu: 500, pue: 1.2,"
    " storage_price: 20}"
)


def write_documents(folder: Path, count: int = 30) -> Path:
    """Text files with different content, enough for a few hundred training sequences."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        lines = [
            f"document {index} line {line}: {'abcdefghij'[line % 10] * 3} the {index * line} quick foxes"
            for line in range(40)
        ]
        (folder / f"note-{index:02d}.txt").write_text("\n".join(lines))
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"What is note {i}?"},
                {"role": "assistant", "content": f"Note {i} is about {i * i} foxes."},
            ]
        }
        for i in range(40)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return folder


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    """The tiny recipe over documents that lie beside it."""
    documents = folder / "documents"
    if not documents.exists():
        write_documents(documents)
    path = folder / "tiny.yaml"
    path.write_text(text.format(documents=documents))
    return path


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(path, overrides)
    return str(caught.value)


def edit(path: Path, *replacements: tuple[str, str]) -> Path:
    text = path.read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)
