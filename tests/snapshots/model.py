"""A random model as a Hugging Face folder: 4,608 tokens of context, so that prompts of 4,096 fit, and a chat
template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

VOCABULARY = 2048
CONTEXT = 4608
CHAT = (
    "{% for one in messages %}<|{{ one['role'] }}|>{{ one['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def write_model(folder: Path, texts: Iterable[str], **more: Any) -> Path:
    """The folder. `texts`: what its byte-level BPE is trained on; `more`: of its config. A token has to hold
    a few bytes: `ruler_cwe` never ends where 4,096 tokens do not hold 320 words."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=CHAT,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
        **more,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_bos(folder: Path) -> Path:
    """The folder, with a tokenizer that begins every text with a BOS, as those made here do."""
    from tokenizers import Tokenizer, processors

    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(file)
    return folder
