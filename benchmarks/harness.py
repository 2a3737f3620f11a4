"""A suite of tasks, beside the harness's own command line: `python -m benchmarks.harness [--documents 1000]`.

Both run `arc_easy` on the same tiny exported model and the same snapshot, each in a new process: ours as the
`harness` part (with the answers stored and committed), the peer as `lm_eval run`, without a network and with
the batch size that ours finds. Each runs with one document and with all of them. The time with one is the
start-up; what the others add, divided by their number, is the time of a unit.

Seconds are those of the processors, of the process and its children, so that other work on the machine
counts little. Each round runs all four, one after the other, and gives one ratio of start-up and one of
documents per second. Printed are the medians over the rounds, with the lowest and the highest ratio. Both
ratios have to be at least 1: a part may not start later, nor answer slower, than the command line.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from apertus_model.generation import local_folder
from infra.store import Artifact
from tests.apertus_model.conftest import Bench
from tests.apertus_model.evaluation.task_data import ARC, write_arc
from tests.apertus_model.preference_artifacts import put_model

OURS = "import sys; from benchmarks.harness import run_part; run_part(*sys.argv[1:])"
TARGET = 1.0
NAMES = ("ours", "lm_eval")


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
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bench = Bench(folder)
        (folder / "texts").mkdir()
        for index in range(50):
            (folder / "texts" / f"{index}.txt").write_text(f"Which of these is number {index}? Answer: word")
        source = {"url": str(folder / "texts"), "format": "text"}
        spec = {"sources": [source], "vocab_size": 512, "bytes_per_source": 100_000}
        model = put_model(bench, bench.run("tokenizer", "tokenizer0", spec))
        write_arc(folder / "data", asked.documents)
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
        rounds = []
        for turn in range(asked.rounds):
            times: dict[tuple[str, int], float] = {}
            for limit in (1, asked.documents):
                ours = ["-c", OURS, str(folder), model.path, str(limit), f"a{turn}-{limit}"]
                for name, command in (("ours", ours), ("lm_eval", [*peer, "--limit", str(limit)])):
                    times[name, limit] = seconds_of(command, folder)
            rounds.append(times)
    start = {name: [times[name, 1] for times in rounds] for name in NAMES}
    rate = {
        name: [(asked.documents - 1) / (times[name, asked.documents] - times[name, 1]) for times in rounds]
        for name in NAMES
    }
    for name in NAMES:
        print(
            f"{name:8} start-up {median(start[name]):6.2f} s, {median(rate[name]):8.1f} documents per second"
        )
    pairs = {
        "start-up": zip(start["lm_eval"], start["ours"], strict=True),
        "documents per second": zip(rate["ours"], rate["lm_eval"], strict=True),
    }
    for what, pair in pairs.items():
        ratios = sorted(over / under for over, under in pair)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} rounds"
        print(f"ratio of {what}: {median(ratios):.2f} ({spread}; at least {TARGET})")


if __name__ == "__main__":
    main()
