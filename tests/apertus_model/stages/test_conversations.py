from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from apertus_model.chat.encoder import TRAINED, ChatEncoder, ChatError
from apertus_model.chat.template import render
from apertus_model.data.conversations.samples import heldout
from apertus_model.data.conversations.splits import AllConversations
from apertus_model.data.conversations.stored import ConversationShards
from infra.store import Artifact, StoreError
from infra.store.documents import Unit, check
from infra.store.inputs import SourceError
from tests.apertus_model.attempts import Interrupted, StopsAfterOneUnit, stored_bytes, units_of
from tests.machine import slow

SPLITS = ("train", "validation")


def _row(number: int, **columns: Any) -> dict[str, Any]:
    turns = [("user", f"What is {number} and one?"), ("assistant", f"It is {number + 1}.")]
    return {
        "messages": [{"role": role, "content": content} for role, content in turns],
        "id": f"row-{number}",
        **columns,
    }


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """Sixty conversations in twelve files; some of them twice, some malformed."""
    folder = tmp_path / "chat"
    folder.mkdir()
    for file in range(12):
        rows: list[Any] = [
            _row(number, group=f"group-{number // 2}", file=file) for number in range(5 * file, 5 * file + 5)
        ]
        if file % 3 == 0:
            rows += [
                _row(7, group="group-3", file=f"again {file}"),
                {"messages": [{"role": "user", "content": "?"}]},
                "no row",
            ]
        (folder / f"{file:02d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _spec(folder: Path, files_per_task: int = 2, **source: Any) -> dict[str, Any]:
    return {
        "source": {"url": str(folder), "format": "chat", **source},
        "process": {"holdout": 0.3},
        "seed": 28,
        "files_per_task": files_per_task,
    }


def test_every_conversation_is_in_one_split_or_counted(bench: Any, chat: Path, tokenizer: Artifact) -> None:
    artifact = bench.run("conversations", "c", _spec(chat), {"tokenizer": tokenizer})
    metrics = artifact.manifest.metrics
    assert metrics["rejected"] == {"no_answer": 4, "not_json": 4}
    assert metrics["duplicates"] == 4
    assert metrics["read"]["conversations"] == 72
    assert metrics["conversations"] == 60
    removed = pq.read_table(artifact.local("rejects-00000.parquet")).to_pylist()
    rows = sorted((row["filter"], row["reason"].partition(":")[0], row["hash"] == 0) for row in removed)
    same = ("duplicates", "the same content as row-7, which stays", False)
    assert rows == [same] * 4 + [("rejected", why, True) for why in ["no_answer"] * 4 + ["not_json"] * 4]
    shards = {split: ConversationShards(artifact, split) for split in SPLITS}
    encoder = ChatEncoder(Tokenizer.from_file(str(tokenizer.local("tokenizer.json"))))
    for split, read in shards.items():
        encoded = [encoder.encode(read.conversation(i).messages) for i in range(len(read))]
        assert [item.tokens.tolist() for item in encoded] == [
            read.tokens(i).tolist() for i in range(len(read))
        ]
        assert [(item.mask == TRAINED).tolist() for item in encoded] == [
            (read.mask(i) == TRAINED).tolist() for i in range(len(read))
        ]
        assert metrics[split] == {
            "conversations": len(read),
            "tokens": int(read.lengths.sum()),
            "trained_tokens": sum(int((item.mask == TRAINED).sum()) for item in encoded),
            "shortest": min(read.lengths),
            "shortest_prompt": min((item.mask == TRAINED).tolist().index(True) for item in encoded),
        }
    found = {split: [read.conversation(i) for i in range(len(read))] for split, read in shards.items()}
    assert sorted(item.id for items in found.values() for item in items) == sorted(
        f"row-{number}" for number in range(60)
    )
    assert {item.group for item in found["train"]}.isdisjoint(item.group for item in found["validation"])
    assert 6 <= len(found["validation"]) <= 30
    assert [item.id for item in found["train"]] != sorted(item.id for item in found["train"])
    facts = artifact.manifest.facts
    assert facts == {
        "tokenizer": "tokenizer0", "vocab_size": 512, "bos_id": 1, "eos_id": 2, "pad_id": 10,
        "end_of_turn_id": 68,
        "train": ["train-00000"], "validation": ["validation-00000"], "compared": {},
    }  # fmt: skip


def test_the_bytes_do_not_depend_on_workers_tasks_or_file_names(
    bench: Any, chat: Path, tokenizer: Artifact
) -> None:
    one = bench.run("conversations", "one", _spec(chat), {"tokenizer": tokenizer}, workers=1)
    two = bench.run(
        "conversations", "two", _spec(chat, files_per_task=5), {"tokenizer": tokenizer}, workers=2
    )
    assert (one.manifest.metrics["tasks"], two.manifest.metrics["tasks"]) == (6, 3)
    assert stored_bytes(one) == stored_bytes(two)
    for number, path in enumerate(sorted(chat.glob("*.jsonl"), reverse=True)):
        path.rename(chat / f"renamed-{number:02d}.jsonl")
    assert stored_bytes(
        bench.run("conversations", "renamed", _spec(chat, files_per_task=3), {"tokenizer": tokenizer})
    ) == stored_bytes(one)


@pytest.mark.parametrize("workers", [1, slow(2)])
def test_a_killed_stage_redoes_only_what_was_not_committed(
    bench: Any, chat: Path, tokenizer: Artifact, workers: int
) -> None:
    spec, inputs = _spec(chat, files_per_task=4), {"tokenizer": tokenizer}
    whole = bench.run("conversations", "whole", spec, inputs)
    with pytest.raises(Interrupted):
        bench.run("conversations", "killed", spec, inputs, workers=workers, attempt_class=StopsAfterOneUnit)
    assert not Artifact(bench.store, "conversations/killed").complete
    first = units_of(bench, "conversations/killed", "first")
    assert first  # of several workers, another one may have been as quick
    resumed = bench.run("conversations", "killed", spec, inputs, attempt="second", workers=workers)
    assert units_of(bench, "conversations/killed", "first") == first
    assert len(units_of(bench, "conversations/killed", "second")) == 3 - len(first)
    assert stored_bytes(resumed) == stored_bytes(whole)
    assert resumed.manifest.metrics == whole.manifest.metrics


def test_a_damaged_unit_is_refused_by_name(bench: Any, chat: Path, tokenizer: Artifact) -> None:
    spec, inputs = _spec(chat, files_per_task=6), {"tokenizer": tokenizer}
    with pytest.raises(Interrupted):
        bench.run("conversations", "c", spec, inputs, attempt_class=StopsAfterOneUnit)
    (lines,) = (bench.folder / "store").rglob("lines.jsonl")
    lines.write_bytes(lines.read_bytes().replace(b"What", b"That", 1))
    with pytest.raises(StoreError, match=r"lines\.jsonl' is damaged"):
        bench.run("conversations", "c", spec, inputs, attempt="second")


def test_another_seed_holds_out_other_groups(bench: Any, chat: Path, tokenizer: Artifact) -> None:
    one = bench.run("conversations", "one", _spec(chat), {"tokenizer": tokenizer})
    other = bench.run("conversations", "other", {**_spec(chat), "seed": 29}, {"tokenizer": tokenizer})
    held_out = [
        {ConversationShards(item, "validation").conversation(i).group for i in range(3)}
        for item in (one, other)
    ]
    assert held_out[0] != held_out[1]


def test_shards_are_bounded_and_hold_the_same_as_one(
    bench: Any, chat: Path, tokenizer: Artifact, tmp_path: Path
) -> None:
    artifact = bench.run("conversations", "c", _spec(chat), {"tokenizer": tokenizer})
    unit = check(
        Unit,
        bench.store.read_json(f"conversations/c/units/{bench.store.names('conversations/c/units')[0]}"),
        "the unit",
    )
    files = {name: Path(bench.store.full(record.path)) for name, record in unit.files.items()}
    conversations = AllConversations([files], 512)
    whole = conversations.write("whole", np.arange(len(conversations)), tmp_path)
    cut = conversations.write("cut", np.arange(len(conversations)), tmp_path, shard_tokens=200)
    assert len(cut.shards) > 2
    assert (cut.conversations, cut.tokens, cut.trained_tokens) == (
        whole.conversations,
        whole.tokens,
        whole.trained_tokens,
    )
    for suffix in (".bin", ".jsonl"):
        pieces = b"".join((tmp_path / f"{shard}{suffix}").read_bytes() for shard in cut.shards)
        assert pieces == (tmp_path / f"whole-00000{suffix}").read_bytes()
    sizes = [len(np.load(tmp_path / f"{shard}.mask.npy")) for shard in cut.shards]
    longest = int(ConversationShards(artifact, "train").lengths.max())
    assert all(200 <= size < 200 + longest for size in sizes[:-1])


def test_of_two_with_the_same_content_the_choice_depends_on_neither_order_nor_file(
    bench: Any, tmp_path: Path, tokenizer: Artifact
) -> None:
    kept = []
    for name, order in (("a", [0, 1, 2, 3]), ("b", [3, 2, 1, 0])):
        folder = tmp_path / name
        folder.mkdir()
        for place, number in enumerate(order):
            (folder / f"{place}.jsonl").write_text(json.dumps(_row(number // 2, version=number)))
        spec = {**_spec(folder, files_per_task=1), "process": {"holdout": 0.5}, "seed": 1}
        artifact = bench.run("conversations", name, spec, {"tokenizer": tokenizer})
        assert artifact.manifest.metrics["duplicates"] == 2
        kept.append([ConversationShards(artifact, split).conversation(0).metadata for split in SPLITS])
    assert kept[0] == kept[1]


def test_the_limit_counts_conversations_over_all_files(bench: Any, chat: Path, tokenizer: Artifact) -> None:
    artifact = bench.run("conversations", "c", _spec(chat, limit=12), {"tokenizer": tokenizer}, workers=2)
    metrics = artifact.manifest.metrics
    assert metrics["conversations"] + metrics["duplicates"] == 12


def test_a_conversation_that_cannot_be_rendered_counts_toward_the_limit(
    bench: Any, chat: Path, tokenizer: Artifact
) -> None:
    """Models that score conversations read them without the template, up to the same one."""
    tools = [{"name": "f", "parameters": {"type": "object", "properties": [1]}}]
    lines = (chat / "00.jsonl").read_text().splitlines()
    (chat / "00.jsonl").write_text("\n".join([json.dumps(_row(1, tools=tools)), *lines[1:]]))
    artifact = bench.run("conversations", "c", _spec(chat, limit=12), {"tokenizer": tokenizer})
    metrics = artifact.manifest.metrics
    assert metrics["rejected"]["not_rendered"] == 1
    assert metrics["conversations"] + metrics["duplicates"] == 11


def test_too_little_to_split_is_refused_with_the_fix(
    bench: Any, chat: Path, tokenizer: Artifact, tmp_path: Path
) -> None:
    spec = _spec(chat)
    with pytest.raises(
        SourceError, match=r"holdout 1e-09 of 30 groups .* holds out none\. Fix: .* a share of 0\.\d+ or more"
    ):
        bench.run("conversations", "a", spec | {"process": {"holdout": 1e-9}}, {"tokenizer": tokenizer})
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.jsonl").write_text(json.dumps(_row(1)))
    with pytest.raises(
        SourceError, match=r"holdout 0\.3 of 1 group .* holds out all\. Fix: set holdout: 0, "
    ):
        bench.run("conversations", "b", _spec(tmp_path / "one"), {"tokenizer": tokenizer})
    (tmp_path / "one" / "a.jsonl").write_text("{\n{\n")
    with pytest.raises(
        SourceError,
        match=r"no conversation .* left: 2 conversations read, rejected: 2 not_json; the first is not_json\.",
    ):
        bench.run("conversations", "d", _spec(tmp_path / "one"), {"tokenizer": tokenizer})
    (tmp_path / "one" / "a.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(
        SourceError,
        match=r"rejected: 1 no_columns; the first is no_columns: .*; there are answer, question\.",
    ):
        bench.run("conversations", "e", _spec(tmp_path / "one"), {"tokenizer": tokenizer})


@pytest.mark.parametrize(("process", "rows"), [({"holdout": 0}, 60), ({}, 1)])
def test_nothing_is_held_out_at_0_or_if_the_default_holds_out_none_of_few(
    bench: Any, tokenizer: Artifact, tmp_path: Path, process: dict[str, Any], rows: int
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(_row(number)) for number in range(rows)))
    spec = _spec(tmp_path, include=["a.jsonl"]) | {"process": process}
    artifact = bench.run("conversations", "c", spec, {"tokenizer": tokenizer})
    assert artifact.manifest.metrics["train"]["conversations"] == rows
    assert artifact.manifest.metrics["validation"] == dict.fromkeys(
        ("conversations", "tokens", "trained_tokens", "shortest", "shortest_prompt"), 0
    )
    shards = ConversationShards(artifact, "validation")
    assert len(shards) == 0
    assert heldout([shards], sequence_length=64, longer="drop", pad_id=0) == []


def test_a_row_without_columns_and_one_of_null_are_counted_among_many(
    bench: Any, chat: Path, tokenizer: Artifact
) -> None:
    with (chat / "01.jsonl").open("a") as file:
        for row in ({"prompt": "q"}, {"messages": None}, {"chosen": "a", "rejected": None, "prompt": "q"}):
            file.write(json.dumps(row) + "\n")
    artifact = bench.run("conversations", "c", _spec(chat), {"tokenizer": tokenizer})
    assert artifact.manifest.metrics["rejected"]["no_columns"] == 3
    removed = pq.read_table(artifact.local("rejects-00000.parquet"))["reason"].to_pylist()
    assert sum(reason.endswith("; there are prompt") for reason in removed) == 1


def test_messages_that_are_not_trained_are_in_the_mask(
    bench: Any, tokenizer: Artifact, tmp_path: Path
) -> None:
    again = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Trained."}]
    rows = [_row(1), _row(2)]
    for row in rows:
        row["messages"] += again
    rows[1]["messages"][1]["weight"] = 0
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = _spec(tmp_path, include=["a.jsonl"]) | {"process": {"holdout": 0}}
    shards = ConversationShards(bench.run("conversations", "c", spec, {"tokenizer": tokenizer}), "train")
    texts = {}
    opened = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    for index in range(2):
        trained = shards.tokens(index)[shards.mask(index) == TRAINED].tolist()
        texts[shards.conversation(index).id] = opened.decode(trained, skip_special_tokens=False)
    end = "<|assistant_end|>"
    assert texts == {"row-1": f"It is 2.{end}Trained.{end}", "row-2": f"Trained.{end}"}


def test_questions_about_functions_have_all_kinds_of_blocks(bench: Any, tokenizer: Artifact) -> None:
    reader = {"format": "conversations", "reader": "examples.questions:function_questions", "version": 1}
    source = {
        "url": "installed:stdlib",
        **reader,
        "include": ["json/*.py", "shutil.py", "textwrap.py", "bisect.py"],
    }
    spec = {"source": source, "process": {"holdout": 0.2}, "seed": 1, "files_per_task": 50}
    artifact = bench.run("conversations", "c", spec, {"tokenizer": tokenizer})
    shards = ConversationShards(artifact, "train")
    found = [shards.conversation(i) for i in range(len(shards))]
    opened = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    texts = [opened.decode(shards.tokens(i).tolist(), skip_special_tokens=False) for i in range(len(shards))]
    assert texts == [render(item.messages, item.tools) for item in found]
    assert all(
        any(token in text for text in texts)
        for token in ("<|inner_prefix|>", "<|tools_prefix|>", "Deliberation: enabled")
    )
    assert {2} <= {int(kind) for i in range(len(shards)) for kind in shards.mask(i)}


def test_a_tokenizer_without_chat_tokens_is_refused(
    bench: Any, chat: Path, tokenizer: Artifact, tmp_path: Path
) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    content = tokenizer.bytes("tokenizer.json").decode().replace("<|tools_suffix|>", "<|other|>")
    (folder / "tokenizer.json").write_text(content)
    (folder / "tokenizer_config.json").write_bytes(tokenizer.bytes("tokenizer_config.json"))
    foreign = bench.run(
        "tokenizer", "foreign", {"path": str(folder), "vocab_size": 512, "bytes_per_source": 1}
    )
    assert "chat_template.jinja" not in foreign.manifest.files
    with pytest.raises(ChatError, match=r"has no <\|tools_suffix\|>"):
        bench.run("conversations", "c", _spec(chat), {"tokenizer": foreign})


def test_a_remote_store_gives_the_same_bytes(
    bench: Any, documents: Path, chat: Path, tokenizer: Artifact, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    here = bench.run("conversations", "c", _spec(chat), {"tokenizer": tokenizer})
    remote = type(bench)(tmp_path / "remote", url=f"memory://{tmp_path.name}")
    source = {"url": str(documents), "format": "text"}
    same = remote.run(
        "tokenizer", "tokenizer0", {"sources": [source], "vocab_size": 512, "bytes_per_source": 100_000}
    )
    there = remote.run("conversations", "c", _spec(chat), {"tokenizer": same})
    assert stored_bytes(there) == stored_bytes(here)
    assert ConversationShards(there, "train").conversation(3) == ConversationShards(
        here, "train"
    ).conversation(3)
