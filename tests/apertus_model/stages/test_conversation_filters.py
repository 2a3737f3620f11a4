"""Filters, shares and personal data in the conversations stage: the outcome of applying each step to the
whole source in turn, the same whatever the tasks and workers; every conversation is accounted for."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from apertus_model.classifiers.fast_text import FastTextModel
from apertus_model.data.conversations.selection import HASHES, KEPT
from apertus_model.data.conversations.stored import ConversationShards
from apertus_model.data.conversations.tasks import DROPPED, REJECTED
from infra.store import Artifact
from infra.store.inputs import SourceError
from tests.apertus_model.attempts import Interrupted, StopsAfterOneUnit, stored_bytes
from tests.apertus_model.encoders import language_texts
from tests.apertus_model.stages.test_scores import classifier

__all__ = ["classifier"]
SPLITS = ("train", "validation")
Row = dict[str, Any]


def _row(question: str, answer: str, **columns: Any) -> Row:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


def _written(folder: Path, rows: list[Row], names: int = 0, files: int = 6) -> Path:
    """The rows as files, in an order that `names` decides."""
    folder.mkdir()
    rows = [{"id": f"row-{number}", **row} for number, row in enumerate(rows)]
    Random(names).shuffle(rows)
    for file in range(files):
        lines = "".join(json.dumps(row) + "\n" for row in rows[file::files])
        (folder / f"{names}-{file}.jsonl").write_text(lines)
    return folder


def _spec(folder: Path, files_per_task: int = 2, **process: Any) -> Row:
    return {
        "source": {"url": str(folder), "format": "chat"},
        "process": {"holdout": 0.3, **process},
        "seed": 28,
        "files_per_task": files_per_task,
    }


def _kept(artifact: Artifact) -> set[str]:
    shards = [ConversationShards(artifact, split) for split in SPLITS]
    return {one.conversation(number).id for one in shards for number in range(len(one))}


def _rejects(artifact: Artifact) -> list[tuple[str, str, str]]:
    names = [name for name in artifact.manifest.files if name.startswith("rejects-")]
    rows = [row for name in sorted(names) for row in pq.read_table(artifact.local(name)).to_pylist()]
    return sorted((row["filter"], row["id"], row["reason"]) for row in rows)


def _urls(artifact: Artifact) -> dict[str, str | None]:
    rows = pq.read_table(artifact.local("rejects-00000.parquet"), columns=["id", "url"]).to_pylist()
    return {row["id"]: row["url"] for row in rows}


def _accounted(artifact: Artifact) -> bool:
    metrics = artifact.manifest.metrics
    out = [*metrics[REJECTED].values(), *metrics[DROPPED].values()]
    out += [metrics["duplicates"], metrics["not_chosen"]]
    kept = sum(metrics[split]["conversations"] for split in SPLITS)
    return bool(metrics["read"]["conversations"] == sum(out) + kept)


@pytest.fixture
def rows(texts: list[str]) -> list[Row]:
    """Sixty questions with different answers."""
    return [
        _row(f"What is number {number}?", text, license="cc" if number % 3 else "secret", stars=number)
        for number, text in enumerate(texts)
    ]


def test_each_filter_reads_conversation_or_answer_and_says_why(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row]
) -> None:
    rows = [*rows[:40], _row("What is " + "very " * 40 + "long?", "short", license="cc", stars=99)]
    shortest = min(len(row["messages"][1]["content"]) for row in rows[:40])
    filters = [
        {"filter": "license", "allow": ["CC"]},
        {"filter": "length", "min_characters": shortest},
        {"filter": "length", "of": "answer", "min_characters": 6},
        {"filter": "score", "column": "stars", "min": 20},
    ]
    spec = _spec(_written(tmp_path / "chat", rows), filters=filters)
    artifact = bench.run("conversations", "c", spec, {"tokenizer": tokenizer})
    assert _accounted(artifact)
    expected = [("length-2", "row-40", "5 characters; required: at least 6")]
    expected += [
        ("license", f"row-{n}", "secret; required: an allowed licence") for n in range(40) if n % 3 == 0
    ]
    expected += [("score", f"row-{n}", f"stars {n}; required: at least 20") for n in range(20) if n % 3]
    assert _rejects(artifact) == sorted(expected)
    assert _kept(artifact) == {f"row-{n}" for n in range(20, 40) if n % 3}
    dropped = {"license": 14, "length": 0, "length-2": 1, "score": 13}
    assert artifact.manifest.metrics["dropped"] == dropped
    assert artifact.manifest.metrics["filters"] == list(dropped)


def _content(row: Row) -> bytes:
    """The content by which conversations are compared, as the data formats describe it."""
    completions = [row["messages"][-1]["content"]]
    return json.dumps([row["messages"], None, completions], ensure_ascii=False).encode()


def _content_hash(row: Row) -> int:
    return int.from_bytes(hashlib.blake2b(_content(row), digest_size=8).digest(), "little")


def test_of_equal_answers_the_smallest_content_stays_among_those_that_reach_the_step(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str]
) -> None:
    rows = [
        _row(
            f"Question {n}, please?",
            texts[n % 15],
            **{"early": n % 4, "late": n % 5, "id": f"row-{n}", "url": f"https://a.example/{n}"},
        )
        for n in range(60)
    ]
    filters = [
        {"filter": "score", "column": "early", "min": 1},
        {"filter": "exact-duplicates", "of": "answer"},
        {"filter": "score", "column": "late", "min": 2},
    ]
    spec = _spec(_written(tmp_path / "chat", rows), filters=filters)
    artifact = bench.run("conversations", "c", spec, {"tokenizer": tokenizer})
    reached = [row for row in rows if row["early"] >= 1]
    groups: dict[str, list[Row]] = {}
    for row in reached:
        groups.setdefault(row["messages"][1]["content"], []).append(row)
    first = [min(group, key=_content_hash) for group in groups.values()]
    assert _kept(artifact) == {row["id"] for row in first if row["late"] >= 2}
    urls = _urls(artifact)  # of what was removed before, by and after the step over the whole source
    assert urls == {name: f"https://a.example/{name[4:]}" for name in urls} and len(urls) > 40
    lost = len(reached) - len(first)
    late = sum(row["late"] < 2 for row in first)
    assert artifact.manifest.metrics["dropped"] == {"score": 15, "exact-duplicates": lost, "score-2": late}
    rejects = _rejects(artifact)
    assert {name for label, name, _ in rejects if label == "score-2"} == {
        row["id"] for row in first if row["late"] < 2
    }
    for label, name, reason in rejects:
        if label == "exact-duplicates":
            (row,) = [row for row in rows if row["id"] == name]
            size = len(groups[row["messages"][1]["content"]])
            assert reason == f"one of {size} alike; required: the one with the smallest hash"
    assert _accounted(artifact)


FILTERS = [
    {"filter": "length", "min_characters": 60},
    {"filter": "exact-duplicates", "of": "answer"},
    {"filter": "sample", "rate": 0.9},
    {"filter": "near-duplicates", "ngram": 2},
    {"filter": "alphabetic", "min_share": 0.7, "of": "answer"},
]


def _collection(rows: list[Row]) -> list[Row]:
    """The rows, ten answers again, and ten with a changed word."""
    again = [_row(f"Once more: {n}?", row["messages"][1]["content"]) for n, row in enumerate(rows[:10])]
    changed = []
    for number, row in enumerate(rows[10:20]):
        words = row["messages"][1]["content"].split(" ")
        words[len(words) // 2] = "changed"
        changed.append(_row(row["messages"][0]["content"], " ".join(words), stars=number))
    numbers = [_row(f"Numbers, {n}?", f"{n}2345 67890 " * 9) for n in range(1, 5)]
    return [*rows, *again, *changed, *numbers, _row("Hi?", "Hi.")]


def test_the_bytes_depend_neither_on_tasks_nor_on_workers_nor_on_a_restart(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row]
) -> None:
    found = []
    for number, (tasks, workers) in enumerate([(6, 1), (1, 2), (4, 1)]):
        folder = _written(tmp_path / f"chat-{number}", _collection(rows), names=number)
        spec = _spec(folder, tasks, filters=FILTERS, pii=True, share=0.9)
        options: Any = {"attempt": "first", "workers": workers}
        if number == 2:
            with pytest.raises(Interrupted):
                bench.run(
                    "conversations", "2", spec, {"tokenizer": tokenizer}, attempt_class=StopsAfterOneUnit
                )
            options["attempt"] = "second"
        found.append(bench.run("conversations", str(number), spec, {"tokenizer": tokenizer}, **options))
    assert stored_bytes(found[0]) == stored_bytes(found[1]) == stored_bytes(found[2])
    metrics = found[0].manifest.metrics
    assert all(metrics["dropped"][name] for name in metrics["filters"])
    assert _accounted(found[0])


def test_what_another_part_keeps_counts_as_seen(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row]
) -> None:
    near = {"filter": "near-duplicates"}
    keep_some = {"filter": "score", "column": "stars", "min": 5}
    first = _written(tmp_path / "first", rows[:20])
    other = bench.run(
        "conversations", "first", _spec(first, filters=[keep_some, near]), {"tokenizer": tokenizer}
    )
    changed = _collection(rows)[70:80]  # like the rows 10 to 19
    second = [*rows[:10], *changed, *rows[30:40]]
    exact = {"filter": "exact-duplicates", "not_in": ["first"]}
    filters = [exact, near | {"not_in": ["first"]}]
    spec = _spec(_written(tmp_path / "second", second), filters=filters)
    inputs = {"tokenizer": tokenizer, "not_in:0:0": other, "not_in:1:0": other}
    artifact = bench.run("conversations", "second", spec, inputs)
    # 0 to 4 are not kept there; 5 to 9 are the same, and ten differ in one word
    alike = artifact.manifest.metrics["dropped"]
    assert alike["exact-duplicates"] == 5
    reason = "like one that a part under not_in keeps; required: like none"
    assert {
        name for label, name, why in _rejects(artifact) if (label, why) == ("exact-duplicates", reason)
    } == {f"row-{n}" for n in range(5, 10)}
    assert _kept(artifact) >= {f"row-{n}" for n in [*range(5), *range(20, 30)]}
    assert (
        alike["near-duplicates"] == len([n for n in range(10, 20) if f"row-{n}" not in _kept(artifact)]) >= 5
    )
    hashes = np.load(other.local(KEPT))
    assert hashes.dtype == HASHES
    assert len(hashes) == other.manifest.metrics["conversations"] == 15
    assert len(np.load(other.local("kept-1.npy"))[0]) == 15


@pytest.mark.parametrize(("less", "more"), [({"share": 0.3}, {"share": 0.6}), ({"count": 12}, {"count": 30})])
def test_a_higher_share_or_count_keeps_the_same_conversations_and_more(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row], less: Row, more: Row
) -> None:
    folder = _written(tmp_path / "chat", [*rows, *rows[:5]])
    few, many = (
        bench.run("conversations", name, _spec(folder, **process), {"tokenizer": tokenizer})
        for name, process in (("few", less), ("many", more))
    )
    assert _kept(few) < _kept(many)
    assert _accounted(few) and _accounted(many)
    places = {}
    for number, row in enumerate(rows):
        digest = hashlib.blake2b(b"28\n" + _content(row), digest_size=8, person=b"place").digest()
        places[f"row-{number}"] = int.from_bytes(digest, "little")
    for artifact, process in ((few, less), (many, more)):
        if "count" in process:
            chosen = set(sorted(places, key=places.__getitem__)[: process["count"]])
            assert artifact.manifest.metrics["conversations"] == process["count"]
        else:
            chosen = {name for name, place in places.items() if place / 2**64 < process["share"]}
        again = {f"row-{number}": f"row-{number - 60}" for number in range(60, 65)}
        assert {again.get(name, name) for name in _kept(artifact)} == chosen
        label, limit = next(iter(process.items()))
        left_out = {again.get(name, name): why for what, name, why in _rejects(artifact) if what == label}
        required = f"below {limit}" if label == "share" else f"one of the {limit} smallest"
        assert left_out == {
            name: f"drawn at {place / 2**64:.9f}; required: {required}"
            for name, place in places.items()
            if name not in chosen
        }


def test_a_count_above_the_number_keeps_all_and_is_noted(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _written(tmp_path / "chat", rows)
    artifact = bench.run("conversations", "c", _spec(folder, count=1000), {"tokenizer": tokenizer})
    assert artifact.manifest.metrics["conversations"] == 60
    assert "count is 1000, and there are 60: all are kept" in capsys.readouterr().out


def test_personal_data_are_replaced_after_the_filters(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row]
) -> None:
    address = [_row(f"Who is {n}?", f"Ask number{n}@post.example for {n}.") for n in range(8)]
    filters = [{"filter": "length", "of": "answer", "min_characters": 28}]
    spec = _spec(_written(tmp_path / "chat", [*rows[:10], *address]), filters=filters, pii=["email"])
    artifact = bench.run("conversations", "c", spec, {"tokenizer": tokenizer})
    assert artifact.manifest.metrics["replaced"] == {"email": 8}
    assert artifact.manifest.metrics["dropped"] == {
        "length": 0
    }  # "Ask <email-pii> for 1." would be too short
    text = b"".join(content for name, content in stored_bytes(artifact).items() if name.endswith(".jsonl"))
    assert b"post.example" not in text and text.count(b"Ask <email-pii> for") == 2 * 8


def test_personal_data_are_replaced_in_the_languages_that_are_stated(
    bench: Any, tmp_path: Path, tokenizer: Artifact
) -> None:
    rows = [
        _row(f"Who is {n}?", f"Ask number{n}@post.example.", language=language)
        for n, language in enumerate(["deu", "fra"] * 8)
    ]
    pii = {"kinds": ["email"], "only": {"language": ["deu"]}}
    spec = _spec(_written(tmp_path / "chat", rows), pii=pii)
    artifact = bench.run("conversations", "c", spec, {"tokenizer": tokenizer})
    assert artifact.manifest.metrics["replaced"] == {"email": 8}
    text = b"".join(content for name, content in stored_bytes(artifact).items() if name.endswith(".jsonl"))
    left = {int(number) for number in re.findall(rb"number(\d+)@post", text)}
    assert left == set(range(1, 16, 2)) and b"Ask <email-pii>." in text


def test_questions_of_an_evaluation_snapshot_are_kept_out(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row]
) -> None:
    import pyarrow as pa

    snapshot = tmp_path / "evaluation" / "openai" / "gsm8k" / "main"
    snapshot.mkdir(parents=True)
    words = rows[3]["messages"][1]["content"].split()
    table = pa.table({"question": [" ".join(words[:12]), "What else is there to ask about it?"]})
    pq.write_table(table, snapshot / "test-00000-of-00001.parquet")
    against = {
        "url": str(tmp_path / "evaluation" / "openai" / "gsm8k"),
        "format": "parquet",
        "text_column": "question",
        "include": ["**/test-*"],
    }
    filters = [{"filter": "decontaminate", "against": [against]}]
    spec = _spec(_written(tmp_path / "chat", rows[:20]), filters=filters)
    artifact = bench.run("conversations", "c", spec, {"tokenizer": tokenizer})
    ((label, name, reason),) = _rejects(artifact)
    assert (label, name) == ("decontaminate", "row-3")
    assert reason.startswith("1.000 of the question '" + " ".join(words[:3]))


@pytest.mark.parametrize("of", ["conversation", "answer"])
def test_a_model_scores_conversations_or_answers_apart_from_the_threshold(
    bench: Any, tmp_path: Path, tokenizer: Artifact, classifier: Artifact, of: str
) -> None:
    """Questions are in one language and answers in another; rows without an answer stand between them."""
    texts = [text for _, text in language_texts()[::9]]
    rows = [_row(question, answer) for question, answer in zip(texts, reversed(texts), strict=True)]
    ends = {"messages": rows[0]["messages"][:1]}
    folder = _written(tmp_path / "chat", [*rows[:7], ends, *rows[7:], ends])
    asked = {
        "source": {"url": str(folder), "format": "chat"},
        "files_per_task": 4,
        "method": "fasttext",
        "label": "de",
        "of": of,
    }
    scores = bench.run("scores", "s", asked, {"classifier": classifier})
    messages = [[message["content"] for message in row["messages"]] for row in rows]
    read = [both[1] if of == "answer" else "\n\n".join(both) for both in messages]
    model = FastTextModel(classifier.local("model.bin"), "model")
    expected = model.probabilities(read, ["de"])[:, 0].tolist()
    names = [f"row-{number + (number >= 7)}" for number in range(len(rows))]
    filter_ = {"filter": "score", "of": of, "model": {"from": "languages", "label": "de"}}
    p90 = scores.manifest.facts["thresholds"][""]["p90"]
    bounds = [({"min": 0.5}, 0.5, 1), ({"min": 0.2}, 0.2, 1), ({"max": "p90"}, 0, p90)]
    for number, (bound, least, most) in enumerate(bounds):
        spec = _spec(folder, files_per_task=1 + number, filters=[{**filter_, **bound}])
        inputs = {"tokenizer": tokenizer, "scores:0": scores}
        artifact = bench.run("conversations", str(number), spec, inputs)
        within = {name for name, score in zip(names, expected, strict=True) if least <= score <= most}
        assert 0 < len(within) < len(rows) and _kept(artifact) == within
        assert artifact.manifest.metrics["rejected"] == {"no_answer": 2}
        assert _accounted(artifact)


def test_a_conversation_that_ends_with_a_user_is_rejected(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row]
) -> None:
    ends = {"messages": [*rows[0]["messages"], {"role": "user", "content": "And then?"}]}
    filters = [{"filter": "length", "of": "answer", "min_characters": 1}]
    spec = _spec(_written(tmp_path / "chat", [*rows[:10], ends]), filters=filters)
    artifact = bench.run("conversations", "c", spec, {"tokenizer": tokenizer})
    assert artifact.manifest.metrics["rejected"] == {"no_answer": 1}
    assert artifact.manifest.metrics["dropped"] == {"length": 0}


def test_filters_that_leave_nothing_are_named(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row]
) -> None:
    folder = _written(tmp_path / "chat", rows)
    filters = [
        {"filter": "score", "column": "stars", "min": 30},
        {"filter": "length", "min_characters": 10**6},
    ]
    message = (
        "60 conversations read, dropped: 30 score, 30 length. Fix: check the globs, the format, the rows"
        " or the"
    )
    with pytest.raises(SourceError, match=message):
        bench.run("conversations", "c", _spec(folder, filters=filters), {"tokenizer": tokenizer})
    late = [{"filter": "near-duplicates"}, filters[1]]
    with pytest.raises(SourceError, match=r"dropped: 60 length|dropped: \d near-duplicates, \d+ length"):
        bench.run("conversations", "d", _spec(folder, filters=late), {"tokenizer": tokenizer})


def test_a_column_that_no_row_has_is_named(
    bench: Any, tmp_path: Path, tokenizer: Artifact, rows: list[Row]
) -> None:
    spec = _spec(
        _written(tmp_path / "chat", rows), filters=[{"filter": "score", "column": "likes", "min": 1}]
    )
    with pytest.raises(SourceError, match="has nothing in column 'likes', which a filter needs"):
        bench.run("conversations", "c", spec, {"tokenizer": tokenizer})
