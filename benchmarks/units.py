"""Units per second, and seconds until the first, of the local pool and of actors of Ray, beside datatrove's
executors: `python -m benchmarks.units`.

Two workers each, on this machine, make the same units. *Empty* ones leave a marker in a store on disk, or
datatrove's file of completion; *real* ones read a file of documents, filter and tokenise them, and as many
documents have to be left. Each contender is a process of its own, which has imported what its work needs
when its clock starts; it still has to import Ray, to connect to the cluster and to start workers. Times are
those of the markers: `units/s` is from the first to the last, `in all` has start and end.

The command starts a cluster of a head without CPUs and a node with two, with a token. Their memory is that
of their processes before any work (PSS: pages that several share are divided among them).

    --address       a running cluster of this machine instead, as HOST:6379
    --empty, --real numbers of units, 2,000 and 40 by default. Of empty ones, datatrove's Ray executor gets
                    few: it starts processes for each
    --documents     of a real unit, 400 by default
    --many          only empty units by Ray, 100,000 or as many as follow. The rates of their tenths show
                    whether the cost of a unit grows
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.corpora import corpus_spec, make_tokenizer, texts, write
from infra.ray_cluster import QUIET
from infra.store import Artifact, Attempt, Store
from specs.job import InputRef, Job

WORKERS = 2
CHARACTERS = 2000  # of a document, on average
SHORTEST, REPEATED = 1200, 0.2  # what the filters keep
EOS = "eos_token"
Made = tuple[float, Path, int]
"""When the work began, as unix time; the folder with a file for each unit; how many documents are left."""


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(run(sys.argv[2], json.loads(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--address")
    parser.add_argument("--empty", type=int, default=2000)
    parser.add_argument("--real", type=int, default=40)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--many", type=int, nargs="?", const=100_000)
    asked = parser.parse_args()
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        address = asked.address or ends.enter_context(cluster())
        if asked.many:
            print_tenths(folder, address, asked.many)
        else:
            compare(folder, address, asked)


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """The address of a cluster of a head without CPUs and one node; prints their memory."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= QUIET | token
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 100_000_000}
    begun = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    try:
        node = begun.add_node(num_cpus=WORKERS, **small)
        time.sleep(5)  # until their agents have started
        sizes = [proportional(member) for member in (begun.head_node, node)]
        print(f"memory (PSS): head {sizes[0]:.0f} MiB, node {sizes[1]:.0f} MiB\n", flush=True)
        yield begun.address
    finally:
        begun.shutdown()


def proportional(node: Any) -> float:
    """MiB of the processes of a node, and of theirs."""
    pids = [process.process.pid for processes in node.all_processes.values() for process in processes]
    total = 0.0
    while pids:
        pid = pids.pop()
        with contextlib.suppress(OSError):  # has ended
            sizes = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            )
            total += int(sizes["Pss"].split()[0]) / 1024
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
    return total


def compare(folder: Path, address: str, asked: argparse.Namespace) -> None:
    store = Store.open(str(folder / "store"))
    store.initialise()
    write(folder / "documents", texts(asked.real * asked.documents, CHARACTERS), asked.documents)
    make_tokenizer(store, folder, folder / "documents")
    few = max(5 * WORKERS, asked.empty // 100)
    runs = [
        ("ours, local", asked.empty, asked.real, WORKERS),
        ("ours, Ray", asked.empty, asked.real, WORKERS),
        ("ours, Ray, 1,000 actors asked for", asked.empty, asked.real, None),
        ("datatrove, local", asked.empty, asked.real, WORKERS),
        ("datatrove, Ray", few, asked.real, WORKERS),
    ]
    for kind in ("empty", "real"):
        print(f"{kind:34} {'units':>8} {'first, s':>9} {'units/s':>9} {'in all, s':>10} {'kept':>8}")
        rates: dict[str, float] = {}
        kept = set()
        for name, empty, real, workers in runs:
            units = empty if kind == "empty" else real
            found = contender(name, folder, address, kind, units, workers)
            rates[name] = found["rate"]
            kept.add(found["kept"])
            print(
                f"{name:34} {units:8,} {found['first']:9.2f} {found['rate']:9.1f} {found['whole']:10.2f}"
                f" {found['kept']:8,}",
                flush=True,
            )
        for where in ("local", "Ray"):
            ratio = rates[f"ours, {where}"] / rates[f"datatrove, {where}"]
            print(f"ours / datatrove, {where}: {ratio:.2f} times the units per second")
        print(flush=True)
        assert len(kept) == 1, f"other documents were kept: {kept}"


def print_tenths(folder: Path, address: str, units: int) -> None:
    store = Store.open(str(folder / "store"))
    store.initialise()
    found = contender("ours, Ray", folder, address, "empty", units, WORKERS)
    print(f"{units:,} empty units, first after {found['first']:.2f} s, in all {found['whole']:.0f} s")
    print("units/s of each tenth: " + ", ".join(f"{rate:.0f}" for rate in found["tenths"]))
    print(f"last tenth / first: {found['tenths'][-1] / found['tenths'][0]:.2f}")


def contender(
    name: str, folder: Path, address: str, kind: str, units: int, workers: int | None
) -> dict[str, Any]:
    """Runs one in a process of its own."""
    settings = {"folder": str(folder), "address": address, "kind": kind, "units": units, "workers": workers}
    command = [sys.executable, "-m", "benchmarks.units", "--run", name, json.dumps(settings)]
    shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode:
        raise SystemExit(f"{name} failed:\n{shown.stdout[-3000:]}{shown.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
    return found


def run(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What one contender needed."""
    which, how, *_ = name.split(", ")
    folder = Path(settings["folder"]) / f"{settings['kind']}-{name.replace(', ', '-')}".replace(" ", "-")
    make: Callable[..., Made] = ours if which == "ours" else datatrove
    begun, files, kept = make(Path(settings["folder"]), folder, how == "Ray", settings)
    ended = time.time()
    times = sorted(file.stat().st_mtime for file in files.iterdir())
    assert len(times) == settings["units"], f"{len(times)} units are complete"
    every = max(1, len(times) // 10)
    return {
        "first": times[0] - begun,
        "rate": (len(times) - 1) / (times[-1] - times[0]),
        "whole": ended - begun,
        "kept": kept,
        "tenths": [every / max(after - before, 1e-6) for before, after in pairwise(times[::every])],
    }


def ours(shared: Path, folder: Path, on_ray: bool, settings: dict[str, Any]) -> Made:
    import apertus_model.stages
    from apertus_model.progress import Progress
    from apertus_model.stop import StopSignal
    from apertus_model.work import run_units

    store = Store.open(str(shared / "store"))
    if empty := settings["kind"] == "empty":
        here = Path(__file__).parent
        folder.mkdir()  # what every Python imports that has it on its path
        (folder / "sitecustomize.py").write_text(
            f"import apertus_model.stages\napertus_model.stages.__path__.append({str(here)!r})\n"
        )
        apertus_model.stages.__path__.append(str(here))
        os.environ["PYTHONPATH"] = f"{folder}:{here.parent}"
        from benchmarks.empty_units import Units
    else:
        from apertus_model.stages.corpus import Units  # type: ignore[assignment]
    filters = [
        {"filter": "length", "min_characters": SHORTEST},
        {"filter": "repeated-lines", "max_share": REPEATED},
    ]
    spec = {"units": settings["units"]} if empty else corpus_spec(shared / "documents", filters, pii=False)
    job = Job(
        node="units",
        kind="empty_units" if empty else "corpus",
        version=1,
        fingerprint=folder.name,
        spec=spec,
        identity=spec,
        inputs={"tokenizer": InputRef(kind="tokenizer", fingerprint="tokenizer", path="tokenizer/tokenizer")},
        launch={"executor": "ray" if on_ray else "local", "workers": {"count": settings["workers"]}},
        store=store.url,
        path=f"units/{folder.name}",
        attempt="first",
        scratch=f"{folder}-scratch",
        progress="",
        profile={"ray": {"address": settings["address"], "gpus": False}},
    )
    Path(job.scratch).mkdir()
    attempt = Attempt(job)
    work = Units(attempt)
    begun = time.time()
    units = run_units(work, attempt, StopSignal(), Progress(None))
    kept = 0 if empty else sum(unit.data["tokenised"] for unit in units)
    return begun, shared / "store" / job.path / "units", kept


def datatrove(shared: Path, folder: Path, on_ray: bool, settings: dict[str, Any]) -> Made:
    from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.filters.gopher_repetition_filter import find_duplicates
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps: list[Any] = []
    if settings["kind"] == "empty":
        steps = [nothing]
    else:
        artifact = Artifact(Store.open(str(shared / "store")), "tokenizer/tokenizer")
        tokenizer, eos = str(artifact.local("tokenizer.json")), artifact.manifest.facts[EOS]
        steps = [
            JsonlReader(str(shared / "documents")),
            LambdaFilter(lambda document: len(document.text) >= SHORTEST),
            LambdaFilter(
                lambda document: (
                    find_duplicates([line for line in document.text.splitlines() if line.strip()])[1]
                    <= REPEATED * len(document.text)
                )
            ),
            DocumentTokenizer(str(folder / "tokens"), tokenizer, eos_token=eos, shuffle_documents=False),
        ]
    given: dict[str, Any] = {
        "tasks": settings["units"],
        "workers": WORKERS,
        "logging_dir": str(folder / "logs"),
    }
    begun = time.time()
    if on_ray:
        import ray

        ray.init(settings["address"], log_to_driver=False)
        RayPipelineExecutor(steps, **given, mem_per_cpu_gb=0.1).run()
        ray.shutdown()
    else:
        LocalPipelineExecutor(steps, **given).run()
    kept = sum(path.stat().st_size for path in (folder / "tokens").glob("*.ds.index")) // 8
    return begun, folder / "logs" / "completions", kept


def nothing(data: Any, rank: int = 0, world_size: int = 1) -> Any:
    """A step of datatrove that does nothing."""
    return data


if __name__ == "__main__":
    main()
