"""Small artifacts that the parts of preference data read: conversations, an exported model, rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from apertus_model.chat.encoder import ChatEncoder
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.rows import Row, write_rows
from apertus_model.data.tokens.megatron import TokenFileWriter, token_dtype
from infra.store import Artifact, Attempt


def dialogue(question: str, *answers: str, **more: Any) -> Conversation:
    """One question; the first answer is the conversation's own, all are its completions."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answers[0]}]
    return Conversation(
        id=more.pop("id", question), messages=messages, completions=list(answers), group=question, **more
    )


def attempt_at(bench: Any, kind: str, fingerprint: str, spec: dict[str, Any] | None = None) -> Attempt:
    return Attempt(bench.job(kind, fingerprint, spec or {}))


def encoder_of(tokenizer: Artifact) -> ChatEncoder:
    return ChatEncoder(Tokenizer.from_file(str(tokenizer.local("tokenizer.json"))))


def put_conversations(
    bench: Any, fingerprint: str, tokenizer: Artifact, conversations: list[Conversation], split: str = "train"
) -> Artifact:
    """An artifact of kind `conversations` with one shard in `split` and none in the other."""
    attempt = attempt_at(bench, "conversations", fingerprint)
    encoder, stated = encoder_of(tokenizer), tokenizer.manifest.facts
    encoded = [encoder.encode(one.messages, one.tools) for one in conversations]
    shard = f"{split}-00000"
    prefix = Path(attempt.workdir) / shard
    with TokenFileWriter(prefix, token_dtype(stated["vocab_size"])) as writer:
        for one in encoded:
            writer.write(one.tokens)
    np.save(f"{prefix}.mask.npy", np.concatenate([one.mask for one in encoded]))
    prefix.with_suffix(".jsonl").write_text(
        "".join(f"{one.to_json()}\n" for one in conversations), encoding="utf-8"
    )
    for suffix in (".bin", ".idx", ".mask.npy", ".jsonl"):
        attempt.put(f"{prefix}{suffix}", f"{shard}{suffix}")
    copied = {name: stated[name] for name in ("vocab_size", "bos_id", "eos_id", "pad_id")}
    end = {"end_of_turn_id": encoder.end_of_turn_id, "tokenizer": "tokenizer0"}
    attempt.commit(metrics={}, facts={**copied, **end, "train": [], "validation": [], split: [shard]})
    return attempt.artifact


def put_rows(
    bench: Any,
    kind: str,
    fingerprint: str,
    rows: list[Row],
    facts: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
) -> Artifact:
    attempt = attempt_at(bench, kind, fingerprint, spec)
    written = write_rows(attempt, kind, rows)
    attempt.commit(metrics={}, facts=(facts or {}) | written)
    return attempt.artifact


def put_model(
    bench: Any, tokenizer: Artifact, *, favourite: int | None = None, scale: float = 1.0
) -> Artifact:
    """A tiny random Apertus as an exported folder. `favourite`: a token that it always predicts; `scale`:
    of its logits."""
    import torch
    from transformers import ApertusConfig, ApertusForCausalLM

    attempt = attempt_at(bench, "export", f"model{favourite}")
    size = tokenizer.manifest.facts["vocab_size"]
    torch.manual_seed(0)
    config = ApertusConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
    )
    model = ApertusForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=scale)
        if favourite is not None:
            model.lm_head.weight.zero_()
            model.model.embed_tokens.weight.fill_(1.0)
            model.model.norm.weight.fill_(1.0)
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.lm_head.weight[favourite] = 10.0
    # advice of the folder that is not asked for
    model.generation_config.update(top_k=1, do_sample=True, repetition_penalty=5.0)
    folder = Path(attempt.workdir) / "exported"
    model.save_pretrained(folder)
    for name in tokenizer.manifest.files:
        (folder / name).write_bytes(tokenizer.bytes(name))
    for path in sorted(folder.iterdir()):
        attempt.put(path, path.name)
    attempt.commit(metrics={})
    return attempt.artifact
