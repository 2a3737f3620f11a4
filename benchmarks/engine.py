"""Training speed of the engine beside a bare PyTorch loop: `python -m benchmarks.engine`.

All contenders train the same model on the same batches with the same optimizer, in processes of their own
with the same number of threads. The bare loop is what a script does without an engine: forward pass, torch's
cross-entropy of all logits, backward pass, clipping, optimizer. The same loop with the fused loss says what
the trainer itself costs, and with FSDP what the trainer avoids: it has no FSDP around one process. The
trainer in bfloat16 is measured with and without FSDP, which give the same bits.

The contenders take turns, a round each, so that what slows the machine slows all. Printed are medians over
the rounds with the smallest and the largest, and the ratio to the bare loop, taken round by round.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from apertus_model.losses.cross_entropy import cross_entropy
from apertus_model.model.model import ApertusModel, model_config
from apertus_model.model.parallelize import apply_fsdp
from apertus_model.trainer.config import debug_config, parallelism_config, trainer_config
from apertus_model.trainer.lifecycle import Lifecycle
from apertus_model.trainer.loader import collate
from apertus_model.trainer.optimizer import Optimizers, optimizer_config
from apertus_model.trainer.process import engine_process
from benchmarks.measure import Contender, race, spread
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule
from specs.settings import Precision
from specs.stages.training import Segment

MINI = ModelSpec(flavour="mini")
WIDTHS = ("dim", "n_heads", "n_kv_heads", "ffn_dim")
WIDER = MINI.model_copy(update={width: 10 * getattr(MINI, width) for width in WIDTHS})
SHAPES = {"mini": MINI, "ten times wider": WIDER}
STEPS = {"mini": 10, "ten times wider": 1}  # of a round
LENGTH, ROWS = 256, 8


class Sample(NamedTuple):
    input: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


class RandomSamples:
    """Random tokens, one document per row."""

    def __init__(self, words: int, length: int = LENGTH) -> None:
        self._words, self._length = words, length

    def __getitem__(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(0, self._words, self._length + 1)
        return Sample(tokens[:-1], tokens[1:], np.arange(self._length))


class Data:
    """The data of a run; nothing is held out."""

    def __init__(self, words: int, length: int = LENGTH) -> None:
        self.samples, self.heldout = RandomSamples(words, length), dict[str, Any]()


class Unrecorded:
    """Drops what a run reports."""

    def add_step(self, row: Any) -> None: ...
    def add_heldout(self, step: int, losses: Any) -> None: ...
    def add_norms(self, step: int, norms: Any) -> None: ...
    def add_anomaly(self, event: Any) -> None: ...


class NoStorage:
    """For runs that end before a checkpoint is due."""

    timed = staticmethod(nullcontext)

    def writer(self, step: int) -> Any: ...
    def prepare_commit(self, step: int, anomalies: Any) -> Any: ...
    def committed(self, step: int) -> Any: ...


def segment(model: ModelSpec) -> Segment:
    """A training that does not end while it is measured."""
    return Segment(
        model=model,
        seed=1,
        sequence_length=LENGTH,
        global_batch_size=ROWS,
        optimizer=OptimizerSpec(lr=1e-3, grad_clip=1.0).resolved({}),
        schedule=Schedule(),
        end_step=1_000_000,
        checkpoint={"interval": 2_000_000},
    )


class Turns:
    """What a contender's process answers: `request()` waits for the next turn and returns its number of
    steps."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left = 0

    def before_step(self) -> bool:
        """Whether to stop. Ends the turn when all its steps are done, and waits for the next one."""
        if self._left == 0:
            self._connection.send("done")
            gc.collect()
            self._left = self._connection.recv()
        self._left -= 1
        return self._left < 0


def trainer(spec: Segment, turns: Turns, scratch: str, *, param: str = "float32", fsdp: bool = False) -> None:
    """The engine, as a training stage runs it, or with FSDP around its process."""
    lifecycle = Lifecycle(
        begin_step=0, source=None, storage=NoStorage(), stop_requested=turns.before_step, scratch=scratch
    )
    spec = spec.model_copy(update={"precision": Precision(param=param)})
    config = trainer_config(spec, Data(spec.model.vocab_size), Unrecorded(), lifecycle, world_size=1)
    with patch("apertus_model.model.parallelize.needs_fsdp", lambda *layout: fsdp):
        run = config.build()
    run.checkpointer.save = lambda step, last_step=False: False
    run.train()


def loop(spec: Segment, turns: Turns, scratch: str, *, fused: bool = True, fsdp: bool = True) -> None:
    """A loop of a few lines, with our loss or torch's, with FSDP around the model or without."""
    config = model_config(spec.model, sequence_length=LENGTH, attention="sdpa", seed=1)
    model = sharded(config, scratch) if fsdp else config.build()
    model.init_weights()
    optimizer = Optimizers(optimizer_config(spec.optimizer), model_parts=[model])
    for tokens, positions, labels in batches(spec.model.vocab_size):
        if turns.before_step():
            return
        optimizer.zero_grad()
        if fused:
            mean_loss = partial(cross_entropy, denominator=ROWS * LENGTH)
            loss = model(tokens, positions, labels=labels, loss_fn=mean_loss)
        else:
            loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        loss.item()


def batches(words: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens, positions, labels) of each step."""
    samples, step = RandomSamples(words), 0
    while True:
        inputs, labels = collate([samples[step * ROWS + row] for row in range(ROWS)])
        yield inputs["input"], inputs["positions"], labels
        step += 1


def sharded(config: ApertusModel.Config, scratch: str) -> ApertusModel:
    """A model in FSDP around this one process."""
    from torchtitan.config import CommConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils

    parallelism = parallelism_config(Parallel())
    dims = ParallelDims.from_config(
        parallelism, dist_utils.init_distributed(CommConfig(), base_folder=scratch)
    )
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    dist_utils.set_determinism(dims, torch.device("cpu"), debug_config(0), distinct_seed_mesh_dims=[])
    with torch.device("meta"):
        model = config.build()
    training = TrainingConfig(mixed_precision_param="float32")
    apply_fsdp(model, dims, training, parallelism, compiled=False)
    return model.to_empty(device="cpu")


CONTENDERS: dict[str, Callable[[Segment, Turns, str], None]] = {
    "bare loop": lambda *run: loop(*run, fused=False, fsdp=False),
    "with the fused loss": lambda *run: loop(*run, fsdp=False),
    "with FSDP": loop,
    "the trainer": trainer,
    "in bfloat16": partial(trainer, param="bfloat16"),
    "in bfloat16, with FSDP": partial(trainer, param="bfloat16", fsdp=True),
}


def work(name: str, model: ModelSpec, threads: int, connection: Connection) -> None:
    """The process of a contender."""
    with tempfile.TemporaryDirectory() as scratch, engine_process(threads=threads):
        CONTENDERS[name](segment(model), Turns(connection), scratch)


def measure(shape: str, *, steps: int, rounds: int, threads: int) -> None:
    """Prints a table of one shape."""
    contenders, connections = [], []
    context = multiprocessing.get_context("spawn")
    for name in CONTENDERS:
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(name, SHAPES[shape], threads, theirs), daemon=True).start()
        ours.recv()  # it is ready for its first turn
        connections.append(ours)

        def turn(connection: Connection = ours) -> int:
            connection.send(steps)
            connection.recv()
            return steps * ROWS * LENGTH

        contenders.append(Contender(name, turn))
    race(contenders, rounds)
    for connection in connections:
        connection.send(0)
    print(
        f"{shape}: {ROWS} x {LENGTH} tokens, {steps} steps a round, {rounds} rounds, {threads} threads",
        flush=True,
    )
    for contender in contenders:
        ratios = [
            mine / bare for mine, bare in zip(contender.per_second, contenders[0].per_second, strict=True)
        ]
        print(
            f"  {contender.name:22} {spread(contender.per_second):>30} tokens/s   x {spread(ratios)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    arguments = parser.parse_args()
    for shape in [arguments.shape] if arguments.shape else SHAPES:
        measure(shape, steps=STEPS[shape], rounds=arguments.rounds, threads=arguments.threads)


if __name__ == "__main__":
    main()
