"""Completions per second of two workers beside one: `python -m benchmarks.workers`.

The same `completions` part, sampled by a random Apertus, by one worker and by two; the bits are compared too.
Each worker has as many threads, so that two have twice the cores of one. A rate is taken from the first
committed unit to the last, and again over the whole stage, with its start (`start`: until the first unit).

    --layers, --dim     of the model; 4 layers of 256 by default
    --prompts, --tokens how many, and how long the completions are
    --threads           of each worker, 1 by default
    --workers           beside one, 2 by default
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from apertus_model.data.rows import write_rows
from apertus_model.progress import Progress
from apertus_model.stages import completions
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, Store
from infra.store.documents import Unit
from specs.job import InputRef, Job

VOCABULARY, END, PAD = 256, 2, 3  # ids are drawn below the first, of a little more than 256
PER_UNIT = 8


class Clocked(Attempt):
    """Notes when each unit is seen."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.seen: dict[str, float] = {}

    def committed_unit(self, key: str) -> Unit:
        self.seen.setdefault(key, time.monotonic())
        return super().committed_unit(key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in (("layers", 4), ("dim", 256), ("prompts", 96), ("tokens", 64), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(str(Path(folder) / "store"))
        store.initialise()
        inputs = {"model": _model(store, folder, asked), "prompts": _prompts(store, folder, asked.prompts)}
        rates, files = {}, {}
        for workers in (1, asked.workers):
            job = _job(store, folder, "completions", f"with-{workers}", inputs, asked, workers)
            rates[workers] = _run(job, asked.prompts)
            files[workers] = Artifact(store, job.path).bytes("completions-00000.jsonl")
            print(
                f"{workers} workers: {rates[workers][0]:.2f} completions/s, {rates[workers][1]:.2f} with the"
                f" start, which takes {rates[workers][2]:.1f} s",
                flush=True,
            )
    assert files[1] == files[asked.workers], "the bits differ"
    ratio, whole = (rates[asked.workers][i] / rates[1][i] for i in range(2))
    print(f"{asked.workers} workers / 1: {ratio:.2f}, {whole:.2f} with the start; the bits are equal")


def _run(job: Job, prompts: int) -> tuple[float, float, float]:
    """Completions per second after the first unit, and of the whole; seconds until the first unit."""
    attempt, begun = Clocked(job), time.monotonic()
    completions.run(attempt, Progress(None), StopSignal())
    ended = time.monotonic()
    seen = sorted(attempt.seen.values())
    return (prompts - PER_UNIT) / (seen[-1] - seen[0]), prompts / (ended - begun), seen[0] - begun


def _job(
    store: Store,
    folder: str,
    kind: str,
    name: str,
    inputs: dict[str, Artifact],
    asked: argparse.Namespace | None = None,
    workers: int = 1,
) -> Job:
    sampling = {"n": 1, "max_new_tokens": asked.tokens if asked else 1, "batch_size": PER_UNIT}
    spec = {"sampling": sampling, "prompts_per_unit": PER_UNIT} if kind == "completions" else {}
    references = {
        role: InputRef(kind=role, fingerprint=role, path=artifact.path) for role, artifact in inputs.items()
    }
    fields: dict[str, Any] = {"node": kind, "kind": kind, "version": 1, "fingerprint": name, "spec": spec}
    return Job(
        **fields,
        identity=spec,
        inputs=references,
        launch={"threads": asked.threads if asked else 1, "workers": {"count": workers}},
        store=store.url,
        path=f"{kind}/{name}",
        attempt="first",
        scratch=f"{folder}/scratch/{kind}/{name}",
        progress="",
    )


def _prompts(store: Store, folder: str, count: int) -> Artifact:
    attempt = Attempt(_job(store, folder, "prompts", "p", {}))
    tokens = np.random.default_rng(0).integers(4, VOCABULARY, size=(count, 32)).tolist()
    rows = ({"id": str(number), "tokens": row} for number, row in enumerate(tokens))
    attempt.commit(
        metrics={}, facts={**write_rows(attempt, "prompts", rows), "end_of_turn_id": END, "pad_id": PAD}
    )
    return attempt.artifact


def _model(store: Store, folder: str, asked: argparse.Namespace) -> Artifact:
    import torch
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import ApertusConfig, ApertusForCausalLM

    from apertus_model.chat.template import CONTROL_TOKENS

    attempt = Attempt(_job(store, folder, "export", "m", {}))
    exported = Path(folder) / "exported"
    torch.manual_seed(0)
    config = ApertusConfig(
        vocab_size=len(CONTROL_TOKENS) + VOCABULARY,
        hidden_size=asked.dim,
        intermediate_size=4 * asked.dim,
        num_hidden_layers=asked.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    ApertusForCausalLM(config).save_pretrained(exported)
    words = [*CONTROL_TOKENS, *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.save(str(exported / "tokenizer.json"))
    for path in sorted(exported.iterdir()):
        attempt.put(path, path.name)
    attempt.commit(metrics={})
    return attempt.artifact


if __name__ == "__main__":
    main()
