from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from apertus_model.chat.encoder import ChatEncoder
from apertus_model.chat.template import render
from apertus_model.tokenizer_files import TokenizerError
from infra.store import Artifact
from infra.store.inputs import SourceError
from specs.errors import StageError

TRICKY = [
    "plain text",
    "  leading and trailing  ",
    "tabs\tand\r\nline\n\n\nbreaks \n",
    "1234567 don't DON'T camelCase HTTPServer snake_case",
    "naïve Ελληνικά Русский 日本語 العربية हिन्दी 🤗👩‍👩‍👧",
    "a</s>b<s>c<pad><|user_start|>",
    "\x00\x7f\u200b\ufeff",
    "",
]


def _folder(artifact: Artifact) -> Path:
    return artifact.local("tokenizer.json").parent


def test_hugging_face_opens_the_folder_and_text_comes_back_exactly(tokenizer: Artifact) -> None:
    opened = AutoTokenizer.from_pretrained(_folder(tokenizer))
    for text in TRICKY:
        ids = opened(text)["input_ids"]
        assert ids[0] == opened.bos_token_id == 1
        assert opened.decode(ids[1:]) == text
    assert (opened.eos_token_id, opened.pad_token_id, opened.unk_token_id) == (2, 10, 0)
    assert opened("hello")["input_ids"][-1] != opened.eos_token_id
    assert len(opened) == 512


def test_the_manifest_states_ids_and_compression(tokenizer: Artifact) -> None:
    assert tokenizer.manifest.facts == {
        "vocab_size": 512, "bos_token": "<s>", "bos_id": 1, "eos_token": "</s>", "eos_id": 2,
        "pad_token": "<pad>", "pad_id": 10,
        "end_of_turn_token": "<|assistant_end|>", "end_of_turn_id": 68,
    }  # fmt: skip
    metrics = tokenizer.manifest.metrics
    assert metrics["vocab_size"] == 512
    assert 1.5 < metrics["bytes_per_token"][0] < 10


def test_each_source_gives_at_most_its_bytes(bench: Any, documents: Path) -> None:
    sources = [
        {"url": str(documents), "format": "text"},
        {"url": str(documents), "format": "text", "limit": 1},
    ]
    artifact = bench.run("tokenizer", "t", {"sources": sources, "vocab_size": 512, "bytes_per_source": 1001})
    assert artifact.manifest.metrics["bytes_read"] == [
        pytest.approx(1001, abs=3),
        len((documents / "00.txt").read_bytes()),
    ]


def test_a_source_cut_inside_its_first_character_trains_a_tokenizer(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\u00e9")
    sources = [{"url": str(tmp_path), "format": "text"}]
    artifact = bench.run("tokenizer", "t", {"sources": sources, "vocab_size": 512, "bytes_per_source": 1})
    assert artifact.manifest.metrics["bytes_per_token"] == [0]


def test_an_existing_folder_is_taken_over_unchanged(bench: Any, tokenizer: Artifact) -> None:
    folder = _folder(tokenizer)
    artifact = bench.run(
        "tokenizer", "imported", {"path": str(folder), "vocab_size": 640, "bytes_per_source": 1}
    )
    assert artifact.bytes("tokenizer.json") == tokenizer.bytes("tokenizer.json")
    assert artifact.manifest.facts | {"vocab_size": 512} == tokenizer.manifest.facts
    assert artifact.manifest.facts["vocab_size"] == 640


def test_run_time_state_of_an_imported_file_is_set_aside_with_a_note(
    bench: Any, tokenizer: Artifact, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_bytes(tokenizer.bytes(name))
    changed = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    changed.enable_truncation(8)
    changed.model.dropout = 0.5
    changed.save(str(tmp_path / "tokenizer.json"))
    spec = {"path": str(tmp_path), "vocab_size": 512, "bytes_per_source": 1}
    artifact = bench.run("tokenizer", "imported", spec)
    assert json.loads(artifact.bytes("tokenizer.json")) == json.loads(tokenizer.bytes("tokenizer.json"))
    assert artifact.manifest.metrics["set_aside"] == ["truncation", "dropout"]
    assert f"tokenizer.json of {tmp_path} states truncation, dropout" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "stated",
    [
        {"split_special_tokens": True},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"added_tokens_decoder": {"61": {"content": "<|system_start|>", "lstrip": True, "special": True}}},
    ],
)
def test_a_folder_that_transformers_opens_as_another_tokenizer_is_refused(
    bench: Any, tokenizer: Artifact, tmp_path: Path, stated: dict[str, Any]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.bytes("tokenizer.json"))
    config = json.loads(tokenizer.bytes("tokenizer_config.json")) | stated
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        SourceError, match=r"transformers opens .* whose tokens of .* Fix: set tokenizer_class"
    ):
        bench.run("tokenizer", "other", {"path": str(tmp_path), "vocab_size": 512, "bytes_per_source": 1})


def test_a_folder_that_transformers_cannot_open_is_refused(
    bench: Any, tokenizer: Artifact, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.bytes("tokenizer.json"))
    config = json.loads(tokenizer.bytes("tokenizer_config.json")) | {"added_tokens_decoder": {"x": 1}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="transformers cannot open the tokenizer of"):
        bench.run("tokenizer", "other", {"path": str(tmp_path), "vocab_size": 512, "bytes_per_source": 1})


def test_hugging_face_renders_conversations_with_the_folder(tokenizer: Artifact) -> None:
    opened = AutoTokenizer.from_pretrained(_folder(tokenizer))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert opened.apply_chat_template(messages, tokenize=False) == render(messages)
    ids = opened.apply_chat_template(messages, return_dict=False)
    encoded = ChatEncoder(Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))).encode(messages)
    assert ids == encoded.tokens.tolist()


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_an_imported_tokenizer_keeps_its_own_chat_template(
    bench: Any, tokenizer: Artifact, tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "imported"
    folder.mkdir()
    config = json.loads(tokenizer.bytes("tokenizer_config.json"))
    if place == "chat_template.jinja":
        (folder / place).write_text("own")
    else:
        config["chat_template"] = "own"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer.bytes("tokenizer.json"))
    artifact = bench.run(
        "tokenizer", "imported", {"path": str(folder), "vocab_size": 512, "bytes_per_source": 1}
    )
    assert AutoTokenizer.from_pretrained(_folder(artifact)).chat_template == "own"


def test_an_imported_tokenizer_without_a_chat_template_gets_ours_if_it_has_the_tokens(
    bench: Any, tokenizer: Artifact, tmp_path: Path
) -> None:
    cases = [
        ("ours", "", True, 68),
        ("other", "<|tools_suffix|>", False, 68),
        ("none", "<|assistant_end|>", False, None),
    ]
    for name, missing, shipped, end in cases:
        folder = tmp_path / name
        folder.mkdir()
        text = tokenizer.bytes("tokenizer.json").decode()
        (folder / "tokenizer.json").write_text(text.replace(missing, "<|renamed|>") if missing else text)
        (folder / "tokenizer_config.json").write_bytes(tokenizer.bytes("tokenizer_config.json"))
        artifact = bench.run(
            "tokenizer", name, {"path": str(folder), "vocab_size": 512, "bytes_per_source": 1}
        )
        assert ("chat_template.jinja" in artifact.manifest.files) is shipped
        assert artifact.manifest.facts["end_of_turn_id"] == end
        assert artifact.manifest.facts["end_of_turn_token"] == (None if end is None else "<|assistant_end|>")


def test_an_imported_vocabulary_that_is_too_large_is_refused_with_the_fix(
    bench: Any, tokenizer: Artifact
) -> None:
    with pytest.raises(
        SourceError, match=r"ids up to 511, too many for vocab_size 384\. Fix: set vocab_size: 512"
    ):
        bench.run(
            "tokenizer",
            "imported",
            {"path": str(_folder(tokenizer)), "vocab_size": 384, "bytes_per_source": 1},
        )


def test_folders_that_hold_no_tokenizer_are_refused(bench: Any, documents: Path, tokenizer: Artifact) -> None:
    spec = {"path": str(documents), "vocab_size": 512, "bytes_per_source": 1}
    with pytest.raises(SourceError, match=r"no file below .*/documents matches include \['tokenizer\.json'"):
        bench.run("tokenizer", "none", spec)
    (documents / "tokenizer_config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"has no tokenizer\.json"):
        bench.run("tokenizer", "a", spec)
    (documents / "tokenizer.json").write_bytes(tokenizer.bytes("tokenizer.json"))
    with pytest.raises(SourceError, match="states no bos_token"):
        bench.run("tokenizer", "b", spec)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", r"the tokenizer .*/imported/tokenizer\.json fails in from_file"),
        ("tokenizer.json", b"\xff", r"the tokenizer .*/imported/tokenizer\.json fails in from_file"),
        (
            "tokenizer_config.json",
            b"{",
            r"tokenizer_config\.json of the tokenizer folder .* cannot be read: .*",
        ),
        (
            "tokenizer_config.json",
            b"\xff",
            r"tokenizer_config\.json of the tokenizer folder .* cannot be read: .*",
        ),
        (
            "special_tokens_map.json",
            b"[]",
            (
                r"special_tokens_map\.json of the tokenizer folder .* cannot be read: it holds \[\], not an"
                r" object"
            ),
        ),
        (
            "tokenizer_config.json",
            b'{"bos_token": "<s>", "eos_token": "<end>"}',
            "states <end>, which its tokenizer.json does not have",
        ),
    ],
)
def test_damaged_files_of_a_tokenizer_folder_are_named(
    bench: Any, tokenizer: Artifact, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = tmp_path / "imported"
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes(tokenizer.bytes(file))
    (folder / name).write_bytes(content)
    with pytest.raises(StageError, match=message):
        bench.run("tokenizer", "imported", {"path": str(folder), "vocab_size": 512, "bytes_per_source": 1})


def test_an_id_beyond_the_vocabulary_is_refused_though_there_are_few_tokens(
    bench: Any, tokenizer: Artifact, tmp_path: Path
) -> None:
    folder = tmp_path / "imported"
    folder.mkdir()
    vocabulary = {"<s>": 0, "</s>": 1, "a": 600}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    with pytest.raises(
        SourceError, match=r"ids up to 600, too many for vocab_size 512\. Fix: set vocab_size: 640"
    ):
        bench.run("tokenizer", "imported", {"path": str(folder), "vocab_size": 512, "bytes_per_source": 1})


def test_a_source_without_text_is_refused_by_name(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text(" \n")
    with pytest.raises(SourceError, match=r"there is no document in the files of .*blank"):
        bench.run(
            "tokenizer",
            "t",
            {
                "sources": [{"url": str(tmp_path / "blank"), "format": "text"}],
                "vocab_size": 512,
                "bytes_per_source": 1,
            },
        )
