"""Runs that are killed at random moments, again and again, until one comes to its end.

The recipe is a sibling of the miniature that takes seconds. It is run by `Runner`, part after part, in a
process of its own (`python -m tests.e2e.crashes RECIPE STORE`): all that `apertus run` does but Prefect,
which decides nothing about what is stored and takes longer to start than most parts.

Invariant: a moment is drawn before its run begins, and whom it hits is drawn among the processes that are
there then; nothing of it looks at what the run has reached. The same seed draws the same numbers.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from flows.execution.runner import Observer, Runner
from flows.planning.plan import Step, make
from infra.store import Artifact, Store
from specs.job import ProgressRow
from specs.recipe import load
from tests.e2e.conftest import Run, command_line
from tests.infra.committed import damaged
from tests.recipes import write_documents

ROLES = {  # by a word of the command line
    "tests.e2e.crashes": "launcher",
    "torch.distributed.run": "torchrun",
    "apertus_model.stages.server": "stage server",
    "apertus_model.stages": "stage or rank",
    "multiprocessing": "data worker",
}
TOGETHER = "all at once"
RESTART = 0.3  # of an uninterrupted run's time: what a run needs, at most, to be where the one before it was
RECIPE = """\
name: crashes
launch: {{processes: {processes}, threads: 1}}
sources:
  notes: {{url: "{documents}", format: text, include: ["*.txt"]}}
stages:
  tokenizer: {{kind: tokenizer, sources: [notes], vocab_size: 384, bytes_per_source: 20_000}}
  corpus: {{kind: corpus, tokenizer: tokenizer, files_per_task: 4, sources: {{notes: {{holdout: 0.2}}}},
    launch: {{workers: {{count: {processes}}}}}}}
  main: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100}}
  pretrain:
    kind: pretrain
    model: {{dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 2, head_dim: 16, ffn_dim: 64, vocab_size: 384}}
    mixture: main
    sequence_length: 32
    global_batch_size: 4
    budget: 120 steps
    optimizer: {{lr: 1e-2, alpha_warmup: 10 steps, beta3_warmup: 10 steps, betas: [0.9, 0.99, 0.99]}}
    schedule: {{warmup: 4 steps}}
    precision: {{param: float32}}
    checkpoint: {{interval: 2, keep: 3}}
    validation: {{interval: 10, samples: 2}}
  cooldown: {{kind: cooldown, from: pretrain, mixture: main, budget: 30 steps, checkpoint: {{interval: 2}},
    validation: {{interval: 0}}}}
  evaluate: {{kind: evaluate, from: cooldown, sources: [corpus/notes], samples: 4}}
"""


@dataclass
class Kill:
    """Who was killed, in which part, how many seconds after the run had begun."""

    victim: str
    part: str
    seconds: float


@dataclass
class Lineage:
    """One store and the runs on it, all killed but the last, which took `seconds`."""

    kills: list[Kill] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def write_recipe(folder: Path, processes: int, *, whole: bool = True) -> Path:
    """The recipe for so many ranks, with its documents; the short one ends with pretraining."""
    documents = folder / "documents"
    if not documents.exists():
        write_documents(documents)
    path = folder / f"crashes-{processes}.yaml"
    text = RECIPE if whole else RECIPE.partition("  cooldown:")[0]
    path.write_text(text.format(processes=processes, documents=documents))
    return path


def interrupted(home: Path, recipe: Path, url: str, random: Random, kills: int, life: float = 0.0) -> Lineage:
    """Runs that are killed, `kills` of them unless one is quicker than its moment, and one that is let
    finish. The moments are spread over `life`, the seconds of an uninterrupted run."""
    lineage = Lineage()
    moments = sorted(random.uniform(0, life) for _ in range(kills))
    for before, moment in zip([0.0, *moments], moments, strict=False):
        seconds = moment - before + random.uniform(0, RESTART * life)
        run = Run(home, str(recipe), url, module=__name__)
        try:
            code = run.process.wait(seconds)
        except subprocess.TimeoutExpired:
            lineage.kills.append(_kill(run, random, seconds))
            continue
        assert code == 0, run.text
        break
    begun = time.monotonic()
    run = Run(home, str(recipe), url, module=__name__)
    assert run.wait(600) == 0, f"{lineage.kills}:\n{run.text}"
    lineage.seconds = time.monotonic() - begun
    lineage.result = result(recipe, url)
    return lineage


def _kill(run: Run, random: Random, seconds: float) -> Kill:
    """kill -9 of all processes, or of those of one role; the launcher then ends by itself, or with it what
    it has started."""
    begun = [line.split()[1].rstrip(":") for line in run.text.splitlines() if line.startswith("run ")]
    roles: dict[str, list[int]] = {}
    for pid in sorted(run.processes()):
        roles.setdefault(_role(pid), []).append(pid)
    victim = random.choice([*sorted(roles), TOGETHER])
    if victim == TOGETHER:
        run.kill_everything()
    else:
        os.kill(random.choice(roles[victim]), signal.SIGKILL)
        run.wait(600)  # a process that nothing depends on may be missed by nobody
        # otherwise the next run begins while the processes of this one are still leaving
        if random.random() < 0.5:
            assert run.no_process_is_left(120), run.text
    return Kill(victim, begun[-1] if begun else "start", round(seconds, 1))


def _role(pid: int) -> str:
    words = command_line(pid)
    return next((role for word, role in ROLES.items() if word in words), "data worker")


def result(recipe: Path, url: str) -> dict[str, Any]:
    """What must not depend on interruptions: digests of all that was made, weights and optimizer state among
    it; losses; metrics.

    AssertionError when a file that a marker names is not what the marker says."""
    store = Store.open(url)
    graph = make(load(recipe), store).graph
    assert damaged(store.fs, store.root) == []
    found: dict[str, Any] = {}
    for name, node in graph.nodes.items():
        artifact = Artifact(store, node.path, node.end_step)
        digests = {
            Path(file).name: (
                hashlib.sha256(store.fs.cat_file(store.full(artifact.stored_name(file)))).hexdigest()
            )
            for file in artifact.manifest.files
        }
        rows = (
            [(row["step"], row["loss"], row["lr"]) for row in artifact.history() if "loss" in row]
            if node.end_step
            else []
        )
        found[name] = {"digests": digests, "losses": rows}
    if "evaluate" in graph.nodes:
        found["metrics"] = Artifact(store, graph.nodes["evaluate"].path).manifest.metrics
    return found


class _Told(Observer):
    """Says on standard output what becomes of the parts."""

    def begin(self, step: Step) -> None:
        print(f"run {step.node.name}: {step.action} {step.resume_step or ''}", flush=True)

    def line(self, name: str, text: str) -> None:
        print(f"{name}: {text}", flush=True)

    def note(self, name: str, text: str) -> None:
        print(f"{name}: {text}", flush=True)

    def progress(self, name: str, row: ProgressRow) -> None: ...

    def end(self, step: Step, outcome: str, seconds: float, metrics: dict[str, Any] | None) -> None:
        print(f"end {step.node.name}: {outcome} after {seconds:.1f} s", flush=True)


def main(recipe: Path, url: str) -> None:
    """Runs what is not finished, in order."""
    pipeline, store = load(recipe), Store.open(url)
    runner = Runner(make(pipeline, store), _Told())
    runner.prepare()
    for name in list(runner.plan.graph.nodes):
        runner.run(runner.plan.graph.nodes[name])
        runner.plan = make(pipeline, store)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
