"""Corpora of odd sizes, and with workers that die: bounded memory, and the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data import topics
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from apertus_model.data.tokens.megatron import TokenFile
from apertus_model.work.units import WorkerLost
from infra.store import Artifact
from tests.apertus_model.attempts import children, stored_bytes

MIB = 2**20
PEAK = """
# The peak of a process counts what its parent held when it was forked: here a parent of a few megabytes
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def _spec(folder: Path, memory: str, filters: list[dict[str, Any]], **process: Any) -> dict[str, Any]:
    return {
        "source": {"url": str(folder), "format": "jsonl", "max_document_bytes": 256 * MIB},
        "process": {"filters": filters, "pii": False, "holdout": 0.1, **process},
        "seed": 28,
        "files_per_task": 1,
        "memory": memory,
    }


def _peak(bench: Any, name: str, spec: dict[str, Any], tokenizer: Artifact) -> tuple[Artifact, int]:
    """Makes a corpus by a process of its own; the bytes of memory that it held at most."""
    job = bench.job("corpus", name, spec, {"tokenizer": tokenizer})
    Path(job.scratch).mkdir(parents=True)
    file = bench.folder / f"{name}.json"
    file.write_text(job.model_dump_json())
    stage = [sys.executable, "-m", "apertus_model.stages", str(file)]
    run = subprocess.Popen(
        [sys.executable, "-c", PEAK, *stage], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with run:
        assert run.stdout is not None
        kilobytes = run.stdout.read().split()[-1]
    assert run.returncode == 0
    return Artifact(bench.store, job.path), int(kilobytes) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("filters", [[], [{"filter": "exact-duplicates"}], [{"filter": "near-duplicates"}]])
def test_a_million_documents_of_one_byte(
    bench: Any, tmp_path: Path, tokenizer: Artifact, filters: list[dict[str, Any]]
) -> None:
    folder = tmp_path / "bytes"
    folder.mkdir()
    letters = Random(0).choices([chr(code) for code in range(33, 127)], k=10**6)
    for number in range(10):
        rows = (json.dumps({"text": one}) + "\n" for one in letters[number::10])
        (folder / f"{number}.jsonl").write_text("".join(rows))
    corpus, peak = _peak(bench, "bytes", _spec(folder, "256MiB", filters), tokenizer)
    expected = Counter(letters) if not filters else Counter(set(letters))
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    found = Counter[int]()
    for split in ("train", "validation"):
        tokens = TokenFile(corpus.local(f"{split}-00000.bin")).tokens.reshape(-1, 3)
        assert (tokens[:, 0] == 1).all() and (tokens[:, 2] == 2).all()
        found.update(tokens[:, 1].tolist())
    assert found == {plain.token_to_id(one): count for one, count in expected.items()}
    metrics = corpus.manifest.metrics
    assert metrics["read"]["documents"] == metrics["read"]["bytes"] == 10**6
    assert sum(metrics["dropped"].values()) == 10**6 - metrics["documents"]
    assert peak < 700 * MIB


@pytest.mark.slow
def test_a_document_of_200_mebibytes(bench: Any, tmp_path: Path, tokenizer: Artifact) -> None:
    line = "the quick brown fox jumps over 13 lazy dogs, and über allen Gipfeln ist Ruh.\n"
    count = 200 * MIB // len(line.encode())
    folder = tmp_path / "large"
    folder.mkdir()
    rows = [line * count, *(f"{line}{number}" for number in range(100))]
    (folder / "0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    corpus, peak = _peak(bench, "large", _spec(folder, "256MiB", []), tokenizer)
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    ids = plain.encode(line, add_special_tokens=False).ids
    files = [TokenFile(corpus.local(f"{split}-00000.bin")) for split in ("train", "validation")]
    largest = max((file[i] for file in files for i in range(len(file))), key=len)
    assert len(largest) == count * len(ids) + 2
    assert (largest[1:-1].reshape(count, len(ids)) == np.array(ids)).all()
    assert peak < 3000 * MIB


@contextmanager
def _killer(seed: int) -> Iterator[list[int]]:
    """Kills a worker of this process now and then, more and more seldom, so that any machine gets to the end;
    those that it killed."""
    random, stop, killed = Random(seed), threading.Event(), list[int]()

    def kill() -> None:
        while not stop.wait(random.expovariate(1) * 1.3 ** len(killed)):
            if workers := children(os.getpid()):
                killed.append(random.choice(sorted(workers)))
                os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_workers_that_are_killed_at_random_leave_the_same_bits(
    bench: Any, tmp_path: Path, tokenizer: Artifact
) -> None:
    random = Random(5)
    words = " ".join(topics.topics.values()).split()
    texts = [" ".join(random.choices(words, k=random.randint(10, 200))) for _ in range(6000)]
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(20):
        rows = [*texts[number::20], *(f"{text} changed" for text in texts[number:1000:40])]
        (folder / f"{number:02d}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in rows))
    filters = [{"filter": "length", "min_characters": 100}, {"filter": "near-duplicates"}]
    repeats = {"buckets": [0, 2], "per_bucket": 5, "length": 12}
    spec = _spec(folder, "4MiB", filters, repeats=repeats) | {"shard_tokens": 200_000}
    inputs = {"tokenizer": tokenizer}
    one = bench.run("corpus", "one", spec, inputs, workers=1)
    assert len(one.manifest.facts["train"]) > 2 and one.manifest.metrics["dropped"]["near-duplicates"] > 20
    for workers in (3, 16):
        with _killer(workers) as killed:
            for attempt in range(50):
                try:
                    name = f"killed-{workers}"
                    same = bench.run("corpus", name, spec, inputs, attempt=f"a{attempt}", workers=workers)
                    break
                except WorkerLost:
                    continue
        assert len(killed) >= 3
        assert stored_bytes(same) == stored_bytes(one)
        assert same.manifest.metrics == one.manifest.metrics
