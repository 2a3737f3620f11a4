"""The outcome of tasks and merge together against the plain reading of the spec: one step after the other
over the whole source."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from datatrove.data import Document

from apertus_model.data.duplicates import MinHash, text_hash
from apertus_model.data.examples import choose, from_jsonl, to_jsonl
from apertus_model.data.filters import make_check
from apertus_model.data.selection import (
    CHARACTERS,
    DROPPED,
    Resolution,
    Selected,
    Selection,
    missing,
    resolve,
)
from specs.filters import ExactDuplicatesFilter, NearDuplicatesFilter, labels
from specs.stages.corpus import CorpusSource

Item = tuple[str, dict[str, Any]]
LISTS = {
    "exact in the middle": [
        {"filter": "length", "min_characters": 30},
        {"filter": "exact-duplicates"},
        {"filter": "score", "column": "s", "min": 2},
    ],
    "near first": [
        {"filter": "near-duplicates", "ngram": 2, "buckets": 6, "hashes_per_bucket": 2},
        {"filter": "sample", "rate": 0.7},
    ],
    "both, and filters around": [
        {"filter": "sample", "rate": 0.9},
        {"filter": "exact-duplicates"},
        {"filter": "score", "column": "s", "min": 1},
        {"filter": "near-duplicates", "ngram": 2, "buckets": 6, "hashes_per_bucket": 2},
        {"filter": "length", "max_characters": 60},
        {"filter": "exact-duplicates"},
    ],
    "no comparison": [{"filter": "length", "min_characters": 30}, {"filter": "length", "max_characters": 60}],
}


def _documents(seed: int) -> list[Item]:
    """Eighty texts of few words: many are equal, many are alike."""
    random = Random(seed)
    names = [f"word{chr(97 + i)}" for i in range(12)]
    texts = [" ".join(random.choices(names, k=random.randint(3, 12))) for _ in range(25)]
    documents = []
    for _ in range(80):
        text = random.choice(texts)
        if random.random() < 0.5:
            split = text.split()
            split[random.randrange(len(split))] = random.choice(names)
            text = " ".join(split)
        documents.append((text, {"s": random.randint(0, 3)}))
    return documents


def _plainly(
    process: CorpusSource, documents: list[Item], folder: Path
) -> tuple[Counter[str], dict[str, tuple[int, int]]]:
    """Each step over everything that is left: the texts that stay, and (documents, characters) dropped by
    each step."""

    def place(item: Item) -> tuple[int, int]:
        return text_hash(item[0]), text_hash(json.dumps([item[1][name] for name in process.columns()]))

    left, dropped = list(documents), {}
    for step, label in zip(process.filters, labels(process.filters), strict=True):
        if isinstance(step, (ExactDuplicatesFilter, NearDuplicatesFilter)):
            if isinstance(step, NearDuplicatesFilter):
                signature = {text: MinHash(step).signature(text) for text, _ in left}
            else:
                signature = {text: np.array([text_hash(text)]) for text, _ in left}
            left.sort(key=place)
            stay: list[Item] = []
            waiting = list(left)
            while waiting:
                group = [waiting.pop(0)]
                stay.append(group[0])
                for member in group:  # grows while it is walked
                    alike = [bool((signature[member[0]] == signature[other[0]]).any()) for other in waiting]
                    group += [other for other, same in zip(waiting, alike, strict=True) if same]
                    waiting = [other for other, same in zip(waiting, alike, strict=True) if not same]
        else:
            check = make_check(step, folder)
            stay = [item for item in left if check(Document(item[0], "d", metadata=dict(item[1]))) is None]
        dropped[label] = (
            len(left) - len(stay),
            sum(len(text) for text, _ in left) - sum(len(text) for text, _ in stay),
        )
        left = stay
    return Counter(text for text, _ in left), dropped


def _in_tasks(
    process: CorpusSource, tasks: list[list[Item]], folder: Path
) -> tuple[Counter[str], dict[str, tuple[int, int]], bytes]:
    """The same by `Selection` and `resolve`, and the examples."""
    written, texts, counts, candidates = [], [], [], []
    for rank, task in enumerate(tasks):
        selection = Selection(process, folder)
        passed = selection.run(
            (Document(text, f"{rank}/{i}", metadata=dict(data)) for i, (text, data) in enumerate(task)), rank
        )
        texts.append([document.text for document in passed])
        prefix = f"{rank:05d}_"
        files = {path.name.removeprefix(prefix): path for path in folder.glob(f"{prefix}*")}
        written.append(files)
        counts.append(selection.counts)
        candidates.append(from_jsonl(files["examples.jsonl"].read_bytes()))
    selected = Selected.open(written, process.filters)
    found: Resolution = resolve(process.filters, selected)
    kept: Counter[str] = Counter()
    for number, task_texts in enumerate(texts):
        task = selected.task(number)
        mask = found.kept[task][selected.tokenised[task]]
        kept.update(text for text, keep in zip(task_texts, mask, strict=True) if keep)
    names = labels(process.filters)
    sums = {group: Counter[str]() for group in (DROPPED, CHARACTERS)}
    for task in [*counts, found.counts]:
        for group, values in task.items():
            sums[group].update(values)
    total = {name: (sums[DROPPED][name], sums[CHARACTERS][name]) for name in names}
    rows = choose(candidates, [*names, "kept", "replaced"], missing(found, selected))
    return kept, total, to_jsonl(rows)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("seed", range(4))
def test_deduplication_keeps_its_place_among_the_filters(name: str, seed: int, tmp_path: Path) -> None:
    process = CorpusSource.model_validate({"filters": LISTS[name], "pii": False})
    documents = _documents(seed)
    expected_kept, expected_dropped = _plainly(process, documents, tmp_path)
    outcomes = []
    for number, split in enumerate(([80], [13, 0, 40, 27], [5] * 16)):
        shuffled = documents.copy()
        Random(number).shuffle(shuffled)
        tasks = [[shuffled.pop() for _ in range(size)] for size in split]
        (tmp_path / str(number)).mkdir()
        kept, dropped, examples = _in_tasks(process, tasks, tmp_path / str(number))
        assert kept == expected_kept
        assert dropped == expected_dropped
        outcomes.append(examples)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(documents) == sum(expected_kept.values()) + sum(
        count for count, _ in expected_dropped.values()
    )


def test_replacements_are_counted_in_the_documents_that_stay(tmp_path: Path) -> None:
    process = CorpusSource.model_validate(
        {"filters": [{"filter": "exact-duplicates"}], "pii": ["ip", "email"]}
    )
    texts = ["write to a@b.org, c@d.org", "write to a@b.org, c@d.org", "ping 8.8.8.8", "nothing"]
    selection = Selection(process, tmp_path)
    passed = [
        document.text for document in selection.run(Document(text, str(i)) for i, text in enumerate(texts))
    ]
    assert passed == ["write to <email-pii>, <email-pii>"] * 2 + ["ping <ip-pii>", "nothing"]
    files = {path.name.removeprefix("00000_"): path for path in tmp_path.glob("00000_*")}
    found = resolve(process.filters, Selected.open([files], process.filters))
    assert process.replaced == ("email", "ip")
    assert found.replaced == [2, 1]
    rows = {
        row["text"]: row
        for row in from_jsonl(files["examples.jsonl"].read_bytes())
        if row["reason"] == "replaced"
    }
    assert rows["ping <ip-pii>"]["before"] == "ping 8.8.8.8"
