"""A suite of tasks, beside the harness's own command line: `python -m benchmarks.harness [--documents 400]`.

Both run `arc_easy` on the same tiny exported model and the same snapshot, each in a new process: ours as the
`harness` part (with the answers stored and committed), the peer as `lm_eval run`, without a network and with
the batch size that ours finds. Each runs with one document and with all of them. The time with one is the
start-up; what the others add, divided by their number, is the time of a unit.

Seconds are those of the processors, of the process and its children, so that other work on the machine
counts little. Printed are seconds of start-up, units (documents) per second, and our ratio to the peer for
both. Both have to be at least 1: a part may not start later, nor answer slower, than the command line.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from apertus_model.generation import local_folder
from infra.store import Artifact
from tests.apertus_model.conftest import Bench
from tests.apertus_model.evaluation.task_data import ARC, write_arc
from tests.apertus_model.preference_artifacts import put_model

OURS = "import sys; from benchmarks.harness import run_part; run_part(*sys.argv[1:])"
TARGET = 1.0


def run_part(folder: str, model: str, limit: str, attempt: str) -> None:
    """The part in this process, with a store in `folder`."""
    bench = Bench(Path(folder))
    artifact = Artifact(bench.store, model)
    spec = {"suite": {"tasks": ["arc_easy"], "limit": int(limit)}, "datasets": f"{folder}/data"}
    bench.run(
        "harness",
        f"h{attempt}",
        spec,
        {"model": artifact, f"data:{ARC}": artifact},
        workers=1,
        attempt=attempt,
    )


def seconds_of(command: list[str], folder: Path) -> float:
    """Seconds of the processors that a command takes in a new process."""
    environment = os.environ | {
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "TQDM_DISABLE": "1",
    }
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder / "data", env=environment, capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.decode()[-2000:])
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime - began.ru_utime + ended.ru_stime - began.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    stated = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bench = Bench(folder)
        (folder / "texts").mkdir()
        for index in range(50):
            (folder / "texts" / f"{index}.txt").write_text(f"Which of these is number {index}? Answer: word")
        source = {"url": str(folder / "texts"), "format": "text"}
        spec = {"sources": [source], "vocab_size": 512, "bytes_per_source": 100_000}
        model = put_model(bench, bench.run("tokenizer", "tokenizer0", spec))
        write_arc(folder / "data", stated.documents)
        exported = local_folder(model, folder / "exported")
        peer = ["-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={exported}"]
        peer += [
            "--tasks",
            "arc_easy",
            "--device",
            "cpu",
            "--batch_size",
            "64",
            "--output_path",
            str(folder / "out"),
        ]
        times: dict[tuple[str, int], float] = {}
        for turn in range(stated.rounds):
            for limit in (1, stated.documents):
                attempt = f"a{turn}-{limit}"
                ours = ["-c", OURS, str(folder), model.path, str(limit), attempt]
                for name, command in (("ours", ours), ("lm_eval", [*peer, "--limit", str(limit)])):
                    took = seconds_of(command, folder)
                    times[name, limit] = min(took, times.get((name, limit), took))
    start = {name: times[name, 1] for name in ("ours", "lm_eval")}
    rate = {
        name: (stated.documents - 1) / max(times[name, stated.documents] - start[name], 1e-9)
        for name in ("ours", "lm_eval")
    }
    for name in ("ours", "lm_eval"):
        print(f"{name:8} start-up {start[name]:6.2f} s, {rate[name]:8.1f} documents per second")
    ratios = {
        "start-up": start["lm_eval"] / start["ours"],
        "documents per second": rate["ours"] / rate["lm_eval"],
    }
    for name, ratio in ratios.items():
        print(f"ratio of {name}: {ratio:.2f} (at least {TARGET})")


if __name__ == "__main__":
    main()
