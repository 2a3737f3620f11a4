"""The Apertus vocabulary at any size: special tokens at their ids, then bytes, then merges of pairs.

Invariants: ids 0 to `reserved - 1` are special tokens and the same in every vocabulary; the vocabulary has
exactly the stated size; training is deterministic.

Sources: ids from the released tokenizer (61 to 72 carry the chat format; they were placeholders in
pretraining); pre-tokenisation is that of Mistral-Nemo ("tekken"), which Apertus took over: no normaliser,
digits one by one, then bytes.
"""

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from apertus_model.chat.template import CONTROL_TOKENS
from apertus_model.tokenizer_files import guarded

UNKNOWN, BOS, EOS, PAD = "<unk>", "<s>", "</s>", "<pad>"
NAMED = {0: UNKNOWN, 1: BOS, 2: EOS, 10: PAD, **dict(enumerate(CONTROL_TOKENS[1:], start=61))}
# Words by case (an optional sign in front), digits one by one, signs, line breaks, white space.
SPLIT_PIECES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


def special_tokens(reserved: int) -> list[str]:
    """The first `reserved` tokens of the vocabulary, by id."""
    return [NAMED.get(index, f"<SPECIAL_{index}>") for index in range(reserved)]


def train(texts: Iterable[str], vocab_size: int, reserved: int) -> Tokenizer:
    """Trains byte-level BPE; a vocabulary that the text cannot fill is filled up with `<UNUSED_n>`."""
    tokenizer = guarded(Tokenizer(models.BPE()), "of this stage")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(SPLIT_PIECES)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, normalized=False, special=True) for token in special_tokens(reserved)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = range(tokenizer.get_vocab_size(), vocab_size)
    tokenizer.add_special_tokens(
        [AddedToken(f"<UNUSED_{index}>", normalized=False, special=True) for index in missing]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def config_files() -> dict[str, dict[str, Any]]:
    """`tokenizer_config.json` and `special_tokens_map.json` for Hugging Face."""
    roles = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN, "pad_token": PAD}
    return {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            **roles,
        },
        "special_tokens_map.json": dict(roles),
    }
