"""Cost and memory of making a corpus, by its number of documents, beside a plain datatrove pipeline:
`python -m benchmarks.corpus`.

Both read the same short documents, drop short ones, those with repeated lines and near-duplicates, tokenise
with the same tokenizer and shuffle all that is left; the numbers of documents and tokens have to be equal.
datatrove's pipeline is its own reader, filters, MinHash steps, `DocumentTokenizer` and
`DocumentTokenizerMerger`, by one worker as ours. Each run is a process of its own. Its cost is time of the
processor, of the system too, since other work on the machine changes the time on the clock; that is printed
beside it. `MiB` is the most memory that it held, with about 220 for what it imports and, while it stores a
file, 33 (of 20 MB) to 80 (of 300 MB and more).

Growth is the cost of a document and the memory, beside those of the fewest documents: 1 where the cost is
linear and memory bounded. At the end, what the plan of the 8B recipe says of its corpora.

    --documents   numbers of documents, 100,000 and 1,000,000 by default
    --characters  of a document on average, 200 by default
    --memory      of a worker, as in a recipe; 256MiB by default, so that few documents fill it
    --filters     `length`, `repeated-lines` and `near-duplicates` by default
    --alone       leaves datatrove out
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.corpora import corpus_spec, make_tokenizer, processor_time, run, texts, write
from benchmarks.measure import memory
from infra.store import Artifact, Store

PER_FILE = 10_000
RECIPE = Path(__file__).parents[1] / "specs" / "recipes" / "apertus-8b.yaml"
FILTERS = ("length", "repeated-lines", "near-duplicates")
TOKEN_BYTES = 2


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(RUNS[sys.argv[2]](Path(sys.argv[3]), json.loads(sys.argv[4]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--characters", type=int, default=200)
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--filters", nargs="*", choices=FILTERS, default=FILTERS)
    parser.add_argument("--alone", action="store_true")
    asked = parser.parse_args()
    names = ["ours"] if asked.alone else ["ours", "datatrove"]
    first: dict[str, dict[str, Any]] = {}
    print(f"{'':10} {'documents':>11} {'documents/s of a core':>22} {'on the clock':>13} {'MiB':>7}   growth")
    for count in sorted(asked.documents):
        with tempfile.TemporaryDirectory() as folder:
            found = measured(Path(folder), count, asked, names)
        for name, used in found.items():
            per_core, clock = count / used["seconds"], count / used["clock"]
            base = first.setdefault(name, used | {"per_core": per_core})
            growth = f"{base['per_core'] / per_core:.2f} in cost, {used['MiB'] / base['MiB']:.2f} in memory"
            print(f"{name:10} {count:11,} {per_core:22,.0f} {clock:13,.0f} {used['MiB']:7,.0f}   {growth}")
        ours = found["ours"]
        print(f"{'':10} seconds of a core by pass: {', '.join(passes(ours))}")
        if not asked.alone:
            ratio = found["datatrove"]["seconds"] / ours["seconds"]
            print(f"{'':10} ours beside datatrove, documents per second of a core: {ratio:.2f}", flush=True)
    print_plan()


def measured(folder: Path, count: int, asked: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """What each of the `names` used for the same documents."""
    documents = folder / "documents"
    write(documents, with_duplicates(texts(count, asked.characters)), PER_FILE)
    store = Store.open(str(folder / "store"))
    store.initialise()
    make_tokenizer(store, folder, documents)
    settings: dict[str, dict[str, Any]] = {
        "length": {"min_characters": int(0.6 * asked.characters)},
        "repeated-lines": {"max_share": 0.2},
        "near-duplicates": {},
    }
    spec = {"memory": asked.memory, "filters": {name: settings[name] for name in asked.filters}}
    found = {}
    for name in names:
        command = [sys.executable, "-m", "benchmarks.corpus", "--run", name, str(folder), json.dumps(spec)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[name] = json.loads(output.splitlines()[-1])
    results = [(used["documents"], used["tokens"]) for used in found.values()]
    assert len(set(results)) == 1, f"documents and tokens differ: {dict(zip(names, results, strict=True))}"
    return found


def with_duplicates(documents: Iterable[str]) -> Iterator[str]:
    """Every twentieth is the one before, but for its last word, and has as many tokens."""
    before = ""
    for number, text in enumerate(documents):
        yield f"{before} and" if number % 20 == 19 else f"{text} the"
        before = text


def passes(used: dict[str, Any]) -> list[str]:
    return [f"{used['tasks']:.0f} read, filter, tokenise", f"{used['after']:.0f} compare, shuffle, write"]


def ours(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """By one worker, in this process."""
    store = Store.open(str(folder / "store"))
    filters = [{"filter": name, **fields} for name, fields in asked["filters"].items()]
    spec = corpus_spec(folder / "documents", filters, pii=False, memory=asked["memory"])
    begun = time.perf_counter()
    tasks, after = run(store, folder, "corpus", "corpus", spec)
    metrics = Artifact(store, "corpus/corpus").manifest.metrics
    used = {"seconds": tasks + after, "tasks": tasks, "after": after, "clock": time.perf_counter() - begun}
    return used | {
        "MiB": memory()["peak"],
        "documents": metrics["documents"],
        "tokens": metrics["tokens"] - metrics["documents"],  # datatrove writes no begin-of-document token
    }


def datatrove(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """By one worker, in this process and the ones that its executor starts."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.filters.gopher_repetition_filter import find_duplicates
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.tokens.merger import DocumentTokenizerMerger
    from datatrove.pipeline.writers import JsonlWriter

    from apertus_model.data.corpora.words import Words

    work = folder / "datatrove"
    files = len(list((folder / "documents").iterdir()))
    logs = iter(range(100))

    def execute(tasks: int, *steps: Any) -> None:
        logging = str(work / "logs" / str(next(logs)))
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            LocalPipelineExecutor(list(steps), tasks=tasks, workers=1, logging_dir=logging).run()

    def at(name: str) -> str:
        return str(work / name)

    artifact = Artifact(Store.open(str(folder / "store")), "tokenizer/tokenizer")
    eos = artifact.manifest.facts["eos_token"]
    fields = asked["filters"]
    checks: dict[str, Callable[[Any], bool]] = {
        "length": lambda document: len(document.text) >= fields["length"]["min_characters"],
        "repeated-lines": lambda document: (
            find_duplicates([line for line in document.text.splitlines() if line.strip()])[1]
            <= fields["repeated-lines"]["max_share"] * len(document.text)
        ),
    }
    filters = [LambdaFilter(checks[name]) for name in fields if name in checks]
    tokenise = DocumentTokenizer(at("tokens"), str(artifact.local("tokenizer.json")), eos_token=eos, seed=28)
    begun, clock = processor_time(), time.perf_counter()
    reader = JsonlReader(str(folder / "documents"))
    if "near-duplicates" in asked["filters"]:
        config = MinhashConfig()
        write_ = JsonlWriter(at("filtered"), output_filename="${rank}.jsonl", compression=None)
        sign = MinhashDedupSignature(at("signatures"), config, language=Words())
        execute(files, reader, *filters, write_, sign)
        execute(config.num_buckets, MinhashDedupBuckets(at("signatures"), at("pairs"), config=config))
        execute(1, MinhashDedupCluster(at("pairs"), at("removed"), config))
        execute(files, JsonlReader(at("filtered")), MinhashDedupFilter(at("removed")), tokenise)
    else:
        execute(files, reader, *filters, tokenise)
    execute(1, DocumentTokenizerMerger(at("tokens"), at("merged"), "corpus", progress=False, seed=28))
    used = {"seconds": processor_time() - begun, "clock": time.perf_counter() - clock}
    size = sum(path.stat().st_size for path in (work / "merged").glob("*.ds"))
    documents = sum(path.stat().st_size for path in (work / "merged").glob("*.ds.index")) // 8
    return used | {"MiB": memory()["peak"], "documents": documents, "tokens": size // TOKEN_BYTES}


def print_plan() -> None:
    """The corpora of the 8B recipe, by its plan."""
    command = [sys.executable, "-m", "flows.cli", "plan", str(RECIPE), "--json"]
    plan = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    for name, work in plan["estimates"]["corpora"].items():
        print(
            f"{RECIPE.stem}, {name}: {work['tokens'] / 1e12:.1f}T tokens; by the plan {work['tasks'] or 1:,}"
            f" tasks, {work['core_hours']:,.0f} hours of a core, {work['moved_bytes'] / 1e12:,.0f} TB moved,"
            f" {work['temporary_bytes'] / 1e12:,.0f} TB stored on the way"
        )


RUNS = {"ours": ours, "datatrove": datatrove}

if __name__ == "__main__":
    main()
