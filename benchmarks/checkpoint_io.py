"""Checkpoints on an S3 server, against what the same client reaches on raw bytes: `python -m
benchmarks.checkpoint_io [--mib 1024]`.

The server is OpenStack Swift on this machine's loopback (`tests.infra.swift`). Ours: `CheckpointWriter` with
DCP and `commit_checkpoint`, as training saves, with digests of every file and the marker; and `load_tensors`,
as training loads. The client alone: s3fs writes the same number of files of the same length, and reads the
very files that we wrote, by each of its ways for whole files; it also reads those that it wrote, whose parts
are longer. Nothing is computed about them, and files on its side are in memory. A file per rank, so ranks are
threads here, each with tensors of its own.

`--disk FOLDER` measures a store on local disk instead, beside a plain write with fsync and a plain read of
the same bytes.

Printed are MiB/s by turns (`benchmarks.measure`), our ratio to each way of the client, turn by turn, and the
requests of one checkpoint by operation. On S3 the ratios have to be at least 0.85.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import s3fs
import torch
import torch.distributed.checkpoint as dcp

from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from benchmarks.measure import spread
from infra.store import Attempt, Store
from infra.store.files.reader import FETCH_BYTES
from infra.store.files.sinks import PART_BYTES
from specs.job import Job
from tests.infra.s3 import requests
from tests.infra.swift import Swift

TARGET = 0.85
MEMORY = Path("/dev/shm")
OWN = "cat_ranges, its own file"
WAYS = {
    "upload": ("pipe_file, our parts", "put_file", "pipe_file"),
    "download": ("get_file", "cat_file", "cat_ranges", OWN),
}
DISK = {"upload": ("write and fsync",), "download": ("readinto",)}


class Bench:
    """`files` checkpoints of one rank each, `mib` MiB together, saved and loaded at the same time."""

    def __init__(self, store: Store, folder: Path, memory: Path, mib: int, files: int) -> None:
        self.store, self.folder, self.files = store, folder, files
        count, values = 8, mib * 2**20 // (8 * files * 4)
        self.states = [
            {f"layer.{index}": torch.randn(values) for index in range(count)} for _ in range(files)
        ]
        self.bytes = sum(tensor.nbytes for state in self.states for tensor in state.values())
        self.raw = [torch.cat(list(state.values())).numpy().tobytes() for state in self.states]
        self.into = [bytearray(len(data)) for data in self.raw]
        self.memory = memory
        for rank, data in enumerate(self.raw):
            (memory / str(rank)).write_bytes(data)
        self.ways = DISK if store.is_local else WAYS
        self.client = None if store.is_local else s3fs.S3FileSystem(skip_instance_cache=True)

    def attempt(self, rank: int) -> Attempt:
        name = uuid.uuid4().hex[:8]
        job = Job(
            node="b", kind="pretrain", version=1, fingerprint="f", spec={}, identity={}, inputs={},
            launch={}, store=self.store.url,
            path=f"pretrain/{name}", attempt=f"rank-{rank}", scratch=str(self.folder / name),
            progress=str(self.folder / "progress"),
        )  # fmt: skip
        return Attempt(job, Store(self.store.fs, self.store.root))

    def save(self, rank: int) -> Attempt:
        attempt = self.attempt(rank)
        writer = CheckpointWriter(attempt.store, attempt.folder(attempt.checkpoint_folder(1)))
        dcp.save(self.states[rank], storage_writer=writer, no_dist=True)
        attempt.commit_checkpoint(1, {}, files=writer.records)
        return attempt

    def load(self, rank: int, attempt: Attempt) -> None:
        load_tensors(self.states[rank], attempt.artifact.checkpoint(1))

    def write_raw(self, rank: int, way: str) -> None:
        """One file, by one of `ways`."""
        path, data = self.store.full(f"raw/{rank}"), self.raw[rank]
        if self.client is None:
            Path(path).parent.mkdir(exist_ok=True)
            with open(path, "wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())
        elif way == "put_file":
            self.client.put_file(str(self.memory / str(rank)), path)
        elif way == "pipe_file":
            self.client.pipe_file(path, data)
        else:
            self.client.pipe_file(path, data, chunksize=PART_BYTES)

    def read_raw(self, rank: int, attempt: Attempt, way: str) -> None:
        """The file of tensors that `save` wrote, or the one that `write_raw` wrote last, by one of `ways`;
        `cat_ranges` in our blocks."""
        path = self.store.full(
            f"raw/{rank}"
            if way == OWN
            else f"{attempt.folder(attempt.checkpoint_folder(1))}/rank-00000.safetensors"
        )
        if self.client is None:
            with open(path, "rb", buffering=0) as file:
                file.readinto(self.into[rank])
        elif way == "get_file":
            self.client.get_file(path, str(self.memory / f"{rank}-read"))
        elif way == "cat_file":
            self.client.cat_file(path)
        else:
            starts = list(range(0, len(self.raw[rank]), FETCH_BYTES))
            self.client.cat_ranges([path] * len(starts), starts, [start + FETCH_BYTES for start in starts])


def seconds(work: Callable[..., Any], *arguments: list[Any]) -> tuple[float, list[Any]]:
    """Of doing it for every rank at the same time, and what came out."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(arguments[0])) as ranks:
        results = list(ranks.map(work, *arguments))
    return time.perf_counter() - begin, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--files", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="FOLDER",
        help="measure a store on local disk, in a folder that is made there",
    )
    options = parser.parse_args()
    if options.disk is not None:
        with tempfile.TemporaryDirectory(dir=options.disk) as folder:
            store = Store.open(f"{folder}/store")
            store.initialise()
            report(Bench(store, Path(folder), Path(folder), options.mib, options.files), options.rounds)
        return
    memory = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=memory) as local:
        swift = Swift(Path(folder) / "swift")
        swift.start()
        try:
            with swift.in_environment() as bucket:
                store = Store.open(f"{bucket}/store")
                store.initialise()
                report(Bench(store, Path(folder), Path(local), options.mib, options.files), options.rounds)
        finally:
            swift.stop()


def report(bench: Bench, rounds: int) -> None:
    ranks = list(range(bench.files))
    times: dict[tuple[str, str], list[float]] = {
        (way, name): [] for way, names in bench.ways.items() for name in ("ours", *names)
    }
    for number in range(rounds + 1):
        attempts: list[Attempt] = []
        for (way, name), durations in times.items():
            if way == "upload" and name == "ours":
                took, attempts = seconds(bench.save, ranks)
            elif way == "upload":
                took, _ = seconds(bench.write_raw, ranks, [name] * bench.files)
            elif name == "ours":
                took, _ = seconds(bench.load, ranks, attempts)
            else:
                took, _ = seconds(bench.read_raw, ranks, attempts, [name] * bench.files)
            durations += [took] if number else []  # the first round does not count
        bench.store.remove("pretrain")
        bench.store.remove("raw")
    size = bench.bytes / 2**20
    print(f"{size:.0f} MiB in {bench.files} files, {rounds} rounds; MiB/s: median (smallest to largest)")
    for (way, name), durations in times.items():
        line = f"{way:8} {name:24} {spread([size / took for took in durations]):>22}"
        if name != "ours":
            ratios = [client / ours for ours, client in zip(times[way, "ours"], durations, strict=True)]
            line += f"   ours: x {spread(ratios)}" + (
                f", MISSED: {TARGET}" if bench.client and statistics.median(ratios) < TARGET else ""
            )
        print(line)
    if bench.client is None:
        return
    with requests() as sent:
        attempt = bench.save(0)
    print("requests of a save of one rank:", dict(sorted(sent.items())))
    with requests() as sent:
        bench.load(0, attempt)
    print("requests of a load of one rank:", dict(sorted(sent.items())))


if __name__ == "__main__":
    main()
