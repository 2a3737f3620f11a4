"""The vocabulary: special tokens first, the size that was asked for, the same bytes everywhere."""

from __future__ import annotations

import json
import subprocess
import sys

from tokenizers import Tokenizer

from apertus_model.data.tokens.vocabulary import special_tokens, train
from infra.store import Artifact


def test_special_tokens_have_the_ids_of_apertus(tokenizer: Artifact) -> None:
    opened = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    expected = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        "<SPECIAL_3>": 3,
        "<pad>": 10,
        "<SPECIAL_60>": 60,
        "<|system_start|>": 61,
        "<|system_end|>": 62,
        "<|developer_start|>": 63,
        "<|developer_end|>": 64,
        "<|user_start|>": 65,
        "<|user_end|>": 66,
        "<|assistant_start|>": 67,
        "<|assistant_end|>": 68,
        "<|inner_prefix|>": 69,
        "<|inner_suffix|>": 70,
        "<|tools_prefix|>": 71,
        "<|tools_suffix|>": 72,
        "<SPECIAL_73>": 73,
        "<SPECIAL_99>": 99,
    }
    assert {token: opened.token_to_id(token) for token in expected} == expected
    assert len(set(special_tokens(100))) == 100


def test_a_vocabulary_that_the_text_cannot_fill_still_has_the_size_asked_for() -> None:
    tokenizer = train(["ab ab ab"], 1024, 100)
    assert tokenizer.get_vocab_size() == 1024
    assert tokenizer.id_to_token(1023) == "<UNUSED_1023>"
    assert tokenizer.decode(tokenizer.encode("abc ż", add_special_tokens=False).ids) == "abc ż"


def test_two_processes_train_the_same_bytes(texts: list[str]) -> None:
    program = (
        "import json, sys\n"
        "from apertus_model.data.tokens.vocabulary import train\n"
        "sys.stdout.write(train(json.load(sys.stdin), 640, 100).to_str())\n"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(texts),
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout
        for _ in range(2)
    }
    assert len(results) == 1
    assert len(json.loads(results.pop())["model"]["vocab"]) > 500
