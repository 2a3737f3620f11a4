"""How fast samples come: the whole path and its parts, beside Megatron-core, torchtitan's text loader and
plain reading of the file.

    python -m benchmarks.data_loader [--tokens 100_000_000] [--rounds 5] [--only throughput ...]

Sections: `throughput`, `parts`, `text` (torchtitan's loader on the same text), `startup`, `memory`, `remote`
(moto's S3 server on this machine, and a file system that answers after 20 ms). Everything is in a temporary
folder, about 5 bytes a token, that goes at the end.

Megatron-core is a peer and no dependency; without it its rows are left out. To have them:

    pip install --no-deps --target FOLDER megatron-core==0.16.1    (compiles its helper with a C++ compiler)
    PYTHONPATH=FOLDER python -m benchmarks.data_loader

It has no Goldfish loss, so its first row does less than ours; the second one adds the published computation
to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apertus_model.data.order.mixture import MixtureOrder
from apertus_model.data.order.mixture_recipe import MixtureRecipe, MixtureSource
from apertus_model.data.order.samples import MixtureSamples, positions_within_documents
from apertus_model.data.tokens.goldfish import goldfish_mask
from apertus_model.data.tokens.megatron import TokenFileWriter, token_dtype
from apertus_model.data.tokens.stream import TokenShard, TokenStream
from apertus_model.trainer.loader import PREFETCH, SampleLoader, collate
from benchmarks.measure import Contender, race, spread, table
from benchmarks.peers import (
    MegatronLoader,
    NoMegatron,
    published_goldfish,
    torchtitan_batches,
    train_tokenizer,
)
from benchmarks.remote import Latency, artifact_on, s3_server, shards_of
from benchmarks.synthetic import (
    BOS,
    EOS,
    VOCAB,
    document_lengths,
    write_corpus,
    write_sparse_corpus,
    write_text,
)
from infra.store.reading.ranges import LocalFile
from specs.settings import Goldfish

LENGTH, BATCH = 4096, 4  # of the 8B model; sequences of a micro-batch
GOLDFISH = Goldfish(k=50, h=50)
NEEDED = 10_000  # tokens per second and GPU of the 8B model
SPARSE_SHARD = 2**31  # tokens, as the corpus stage writes them
SECTIONS = ("throughput", "parts", "text", "startup", "memory", "remote")


def local_shards(paths: list[Path], vocab_size: int = VOCAB) -> list[TokenShard]:
    """Token files, by their paths without suffix, as the shards of a split."""
    files = [(LocalFile(f"{path}.bin"), LocalFile(f"{path}.idx")) for path in paths]
    return [TokenShard(data, index, token_dtype(vocab_size), vocab_size) for data, index in files]


def open_samples(
    shards: list[TokenShard], *, vocab_size: int = VOCAB, goldfish: Goldfish | None = GOLDFISH
) -> MixtureSamples:
    """A mixture of one corpus."""
    source = MixtureSource(fingerprint="0" * 32, path="corpus", weight=1, tokens=0, documents=0)
    recipe = MixtureRecipe(
        seed=28,
        sources=[source],
        tokenizer="t",
        vocab_size=vocab_size,
        bos_id=BOS,
        eos_id=EOS,
    )
    return MixtureSamples.open(recipe, [shards], sequence_length=LENGTH, goldfish=goldfish)


def loader(samples: MixtureSamples, prefetch: int) -> SampleLoader:
    """The loader of a single process."""
    config = SampleLoader.Config(
        samples=samples, first_sample=lambda step: step * BATCH, global_batch_size=BATCH, prefetch=prefetch
    )
    return SampleLoader(config, dp_world_size=1, dp_rank=0, local_batch_size=BATCH)


def taking(batches: Any, count: int) -> Callable[[], int]:
    """Takes `count` batches of (inputs, labels); their tokens."""
    return lambda: sum(labels.numel() for _, labels in itertools.islice(batches, count))


def megatron(prefix: Path, cache: Path, **options: Any) -> MegatronLoader | None:
    """None where Megatron-core is not installed."""
    try:
        return MegatronLoader(prefix, cache, sequence_length=LENGTH, vocab_size=VOCAB, eod=EOS, **options)
    except NoMegatron as error:
        print(f"(Megatron-core is left out: {error}; see the head of this file)")
        return None


def throughput(folder: Path, corpus: Path, rounds: int) -> None:
    """The whole path, side by side."""
    contenders = []
    for title, goldfish, prefetch in (
        ("Apertus, Goldfish", GOLDFISH, 0),
        (f"Apertus, Goldfish, {PREFETCH} batches ahead", GOLDFISH, PREFETCH),
        ("Apertus, no Goldfish", None, 0),
    ):
        contenders.append(
            Contender(
                title,
                taking(iter(loader(open_samples(local_shards([corpus]), goldfish=goldfish), prefetch)), 500),
            )
        )
    base = None
    for title, restart, goldfish in (
        ("Megatron-core, restart at documents", True, None),
        ("Megatron-core and the published Goldfish", True, GOLDFISH),
        ("Megatron-core, masks and positions made once", False, None),
    ):
        peer = megatron(corpus, folder / "indices", restart=restart)
        if peer is not None:
            contenders.append(Contender(title, _megatron_run(peer, goldfish)))
            base = contenders[-1] if goldfish else base
    contenders.append(
        Contender(
            "reading the .bin from its start, 1 MiB at a time", lambda: _read_all(Path(f"{corpus}.bin"))
        )
    )
    race(contenders, rounds)
    print(table(contenders, base))
    for peer in contenders[3:5] if base else []:
        ratio = [
            ours / theirs
            for ours, theirs in zip(contenders[0].per_cpu_second, peer.per_cpu_second, strict=True)
        ]
        print(f"with Goldfish against {peer.name}: x {spread(ratio)}")
    share = NEEDED / statistics.median(contenders[0].per_cpu_second)
    print(f"of a step at {NEEDED} tokens/s and GPU, on one core, nothing ahead: {share:.3%}")


def _megatron_run(peer: MegatronLoader, goldfish: Goldfish | None = None) -> Callable[[], int]:
    firsts = itertools.count(0, BATCH)

    def run() -> int:
        tokens = 0
        for _ in range(100):
            batch = peer.batch(next(firsts), BATCH)
            if goldfish is not None:
                batch["loss_mask"][published_goldfish(batch["labels"], goldfish.k, goldfish.h)] = 0.0
            tokens += batch["labels"].numel()
        return tokens

    return run


def _read_all(path: Path) -> int:
    done = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(2**20):
            done += len(chunk)
    return done // 4


def parts(corpus: Path, rounds: int) -> None:
    """What a sample's time is spent on; every part works on other windows each time."""
    samples, stream = open_samples(local_shards([corpus])), TokenStream(local_shards([corpus]))
    order = MixtureOrder([Fraction(1)], [stream.windows(LENGTH)], 28)
    numbers, count = itertools.count(), 400
    windows = [
        stream.read(order[i].window * LENGTH, order[i].window * LENGTH + LENGTH + 1) for i in range(count)
    ]
    ends = [np.flatnonzero(window[:-1] == EOS) for window in windows]
    drawn = [samples[i] for i in range(count)]

    def each(work: Callable[[int], object]) -> Callable[[], int]:
        def run() -> int:
            for i in range(count):
                work(i)
            return count * LENGTH

        return run

    def read(i: int) -> None:
        start = (next(numbers) * 7919 % stream.windows(LENGTH)) * LENGTH
        stream.read(start, start + LENGTH + 1)

    contenders = [
        Contender("index: which window", each(lambda i: order[next(numbers)])),
        Contender("read: random windows, to int64, ids checked", each(read)),
        Contender("Goldfish mask", each(lambda i: goldfish_mask(windows[i][1:], GOLDFISH.k, GOLDFISH.h))),
        Contender("positions", each(lambda i: positions_within_documents(ends[i], LENGTH))),
        Contender(f"collate: {BATCH} samples", each(lambda i: i % BATCH or collate(drawn[i : i + BATCH]))),
        Contender("all of it: samples", each(lambda i: samples[next(numbers)])),
    ]
    race(contenders, rounds)
    print(table(contenders, None))
    for part in contenders:
        print(
            f"  {part.name:58} {spread([LENGTH / rate * 1e6 for rate in part.per_cpu_second])} us per"
            f" sequence of {LENGTH}"
        )


def text(folder: Path, rounds: int) -> None:
    """torchtitan tokenises as it trains; we once, beforehand. The same documents and tokenizer."""
    path = write_text(folder / "text.jsonl", 2_000_000)
    tokenizer = train_tokenizer(path, folder / "tokenizer", 16_384)
    with TokenFileWriter(folder / "text", "<u2") as writer, open(path, encoding="utf-8") as file:
        for line in file:
            writer.write(np.array([BOS, *tokenizer.encode(json.loads(line)["text"]).ids, EOS]))
    peer = torchtitan_batches(
        path, folder / "tokenizer", folder / "datasets", sequence_length=LENGTH, batch_size=BATCH
    )
    size = tokenizer.get_vocab_size()
    ours = iter(loader(open_samples(local_shards([folder / "text"], size), vocab_size=size), 0))
    contenders = [
        Contender("Apertus, tokenised before", taking(ours, 200)),
        Contender("torchtitan's text loader", taking(peer, 10)),
    ]
    race(contenders, rounds)
    print(table(contenders, contenders[1]))


def startup(folder: Path, rounds: int) -> None:
    """From nothing to the first batch; files of holes, which open like real ones. Megatron-core: without
    and with its cached indices."""
    for tokens in (10**7, 10**8, 10**9, 10**12, 15 * 10**12):
        lengths = (
            document_lengths(tokens)
            if tokens <= 10**9
            else np.full(-(-tokens // SPARSE_SHARD), SPARSE_SHARD - 1)
        )
        work = folder / f"sparse-{tokens}"
        work.mkdir()
        if tokens <= 10**9:
            shards = [write_sparse_corpus(work / "s", lengths)]
        else:
            shards = [
                write_sparse_corpus(work / f"s{number:05d}", lengths[number : number + 1])
                for number in range(len(lengths))
            ]

        def ours(shards: list[Path] = shards) -> object:
            return next(iter(loader(open_samples(local_shards(shards)), 0)))

        line = f"{tokens / 1e9:>10,.2f} B tokens, {len(shards):>5} shards: Apertus {_seconds(ours, rounds)}"
        if tokens <= 10**9:
            caches = itertools.count()

            def theirs(work: Path = work, caches: Any = caches, new: bool = True) -> object:
                peer = megatron(work / "s", work / f"cache-{next(caches) if new else 0}", restart=True)
                return peer and peer.batch(0, BATCH)

            if theirs() is not None:
                line += (
                    f"; Megatron-core {_seconds(theirs, rounds)}, again"
                    f" {_seconds(lambda: theirs(new=False), rounds)}"
                )
        print(line)
        shutil.rmtree(work)


def _seconds(work: Callable[[], object], rounds: int) -> str:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return f"{spread(times, 1000)} ms"


WORKER = """
import sys
from pathlib import Path
from benchmarks.data_loader import loader, local_shards, open_samples
from benchmarks.measure import memory
from apertus_model.trainer.loader import PREFETCH

shards = [Path(line) for line in sys.stdin.read().split()]
before = memory()
batches = iter(loader(open_samples(local_shards(shards)), PREFETCH))
next(batches)
opened = memory()
for _ in range(2000):
    next(batches)
after = memory()
growth = ", ".join(
    f"{name} +{opened[name] - before[name]:.0f}, then +{after[name] - opened[name]:.0f}" for name in before
)
libraries = f"MiB over the {before['peak']:.0f} of the libraries"
print(f"{len(shards)} shards; {libraries}, at the first batch and after 2,000 more: {growth}")
"""


def memory_of_a_worker(folder: Path, corpus: Path) -> None:
    """In a process of its own: what the loader adds, for a corpus on one disk and for 15T tokens in 6,985
    shards."""
    sparse = folder / "big"
    sparse.mkdir()
    big = [sparse / f"s{number:05d}" for number in range(15 * 10**12 // SPARSE_SHARD + 1)]
    for prefix in big:
        write_sparse_corpus(prefix, np.array([SPARSE_SHARD - 1]))
    for shards in ([corpus], big):
        subprocess.run(
            [sys.executable, "-c", WORKER], input="\n".join(map(str, shards)), text=True, check=True
        )
    shutil.rmtree(sparse)


def remote(folder: Path, rounds: int) -> None:
    """The whole path from elsewhere, in blocks, cache empty; and what a step of training waits for."""
    # Of 4 MB each: moto copies the whole object for any part of it, which no real server does.
    corpus = [write_corpus(folder / f"remote-{number:05d}", 1_000_000, seed=number) for number in range(16)]
    places = {f"{Latency.SECONDS * 1000:.0f} ms per request": "latency://store"}
    with ExitStack() as servers:
        try:
            places["S3 (moto)"] = servers.enter_context(s3_server())
        except ImportError as error:
            print(f"(S3 is left out: {error}; see the head of this file)")
        for name, place in places.items():
            artifact = artifact_on(place, corpus, folder / "scratch")
            for prefetch in (0, PREFETCH):
                rates = []
                for _ in range(rounds):
                    shards, cache = shards_of(artifact, folder / "scratch")
                    batches = iter(loader(open_samples(shards), prefetch))
                    begin = time.perf_counter()
                    next(batches)
                    first = time.perf_counter() - begin
                    begin = time.perf_counter()
                    tokens = taking(batches, 20)()
                    rates.append(tokens / (time.perf_counter() - begin))
                    batches.close()
                print(
                    f"{name:18} {prefetch} ahead: first batch {first * 1000:.0f} ms, then"
                    f" {spread(rates, 1e-6)} M tokens/s, {cache.fetched_bytes / 2**20:.0f} MiB fetched"
                )
            shards, _ = shards_of(artifact, folder / "scratch")
            for prefetch in (0, PREFETCH):
                share = _waited(loader(open_samples(shards), prefetch))
                print(f"{name:18} {prefetch} ahead: {share:.3%} of the time of a step waited for data")


def _waited(source: SampleLoader, steps: int = 8) -> float:
    """Share of the time that steps of training (here: sleep) at `NEEDED` tokens per second and GPU wait
    for their batches."""
    batches = iter(source)
    next(batches)
    waited = 0.0
    begin = time.perf_counter()
    for _ in range(steps):
        time.sleep(BATCH * LENGTH / NEEDED)
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
    source.close()
    return waited / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of the corpus on local disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="data-loader-"))
    rounds = arguments.rounds
    print(
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; {rounds} rounds, median (smallest to"
        " largest)"
    )
    try:
        needs_corpus = {"throughput", "parts", "memory"} & set(arguments.only)
        corpus = write_corpus(folder / "corpus", arguments.tokens) if needs_corpus else folder
        sections: dict[str, Callable[[], None]] = {
            "throughput": lambda: throughput(folder, corpus, rounds),
            "parts": lambda: parts(corpus, rounds),
            "text": lambda: text(folder, rounds),
            "startup": lambda: startup(folder, rounds),
            "memory": lambda: memory_of_a_worker(folder, corpus),
            "remote": lambda: remote(folder, min(rounds, 3)),
        }
        for name in arguments.only:
            print(f"\n== {name}")
            sections[name]()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
