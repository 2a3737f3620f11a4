"""Tiny folders of other architectures, each with its own tokenizer, chat template and ends of a turn, laid
out as released models of the kind are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OLMO = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
KINDS = {  # architecture: config class, special tokens (the last one ends a turn), template
    "LlamaForCausalLM": (
        "LlamaConfig",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        LLAMA,
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], QWEN),
    "Olmo2ForCausalLM": ("Olmo2Config", ["<|endoftext|>"], OLMO),
}


def other_folder(target: Path, architecture: str, *, favourite: str | None = None, **changes: Any) -> Path:
    """A random model. `favourite`: a token that it always predicts; `changes`: of its sizes."""
    import transformers

    config_class, special, template = KINDS[architecture]
    target.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the answer to the question is in the text " * 8], trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    stated = {"bos_token": special[0], "eos_token": special[-1], "tokenizer_class": "PreTrainedTokenizerFast"}
    if architecture == "LlamaForCausalLM":
        stated["chat_template"] = template
    else:
        (target / "chat_template.jinja").write_text(template)
    (target / "tokenizer_config.json").write_text(json.dumps(stated))
    sizes = {"vocab_size": 512, "eos_token_id": tokenizer.token_to_id(special[0]), "bos_token_id": 0, **SIZES}
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**(sizes | changes), tie_word_embeddings=False)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        model.lm_head.weight.normal_()
        if favourite is not None:
            model.lm_head.weight.zero_()
            model.model.embed_tokens.weight.fill_(1.0)
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.zero_()
            model.lm_head.weight[tokenizer.token_to_id(favourite)] = 10.0
    ends = [tokenizer.token_to_id(special[0]), tokenizer.token_to_id(special[-1])]
    model.generation_config.update(eos_token_id=ends, pad_token_id=None)
    model.save_pretrained(target)
    return target
