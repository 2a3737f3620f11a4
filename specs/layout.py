"""Requirements of a parallel layout on model, sequence and batch, as far as the recipe alone decides them.

Invariant: the engine runs every layout that passes here; `docs/parallelism.md` says how that was checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from specs.launch import Launch, Parallel
from specs.model import ModelSpec


class Misfit(NamedTuple):
    """A degree of parallelism that does not fit."""

    field: str  # of `parallel`
    message: str
    fix: str


def misfits(launch: Launch, model: ModelSpec, sequence_length: int | None = None, batch: int | None = None) -> Iterator[Misfit]:
    """The degrees that the model, the longest sequence or the global batch does not allow."""
    parallel = launch.parallel or Parallel()
    tp, cp, stages = parallel.tp, parallel.cp, parallel.stages
    for name in ("n_kv_heads", "n_heads", "ffn_dim", "vocab_size"):
        if (size := getattr(model, name)) % tp:
            yield Misfit("tp", f"{name} {size} cannot be divided among {tp} tensor-parallel processes", f"use a divisor of {size}.")
            break
    if model.n_layers + 2 < 2 * stages:
        kind = " (two per process)" if stages > parallel.pp else ""
        message = (
            f"{model.n_layers} layers are too few for a pipeline of {stages} stages{kind}: each stage needs "
            "two, counting embeddings and output as a layer each"
        )
        yield Misfit("pp", message, f"use {(model.n_layers + 2) // 2} stages at most.")
    pieces = (2 * cp if cp > 1 else 1) * (tp if parallel.sequence_parallel else 1)
    if sequence_length is not None and sequence_length % pieces:
        how = f"cp {cp}" + (f" with sequence parallelism over tp {tp}" if parallel.sequence_parallel and tp > 1 else "")
        message = f"sequence_length {sequence_length} is not a multiple of {pieces}, which {how} needs"
        yield Misfit("cp" if cp > 1 else "sequence_parallel", message, "change the degree or sequence_length.")
    if batch is not None and (share := batch // launch.data_parallel) and micro_batch_size(parallel, share) is None:
        message = (
            f"a batch of {batch} sequences is {share} for each of {launch.data_parallel} data-parallel pipelines, "
            f"which cannot be split into micro-batches for {stages} stages ({parallel.pp_schedule})"
        )
        yield Misfit("pp", message, f"use a batch that gives each a multiple of {stages}, or fewer stages or processes.")


def micro_batch_size(parallel: Parallel, share: int, at_most: int | None = None) -> int | None:
    """Sequences per forward pass: the largest divisor of `share` that is at most `at_most`. A pipeline also wants as many
    micro-batches as it has stages, and `interleaved-1f1b` rounds of equal length, of `pp` micro-batches or a few more.

    Args:
        parallel: layout.
        share: sequences of a step on each data-parallel rank.
        at_most: upper limit; none by default.

    Returns:
        None where no size fits.
    """
    for size in range(min(at_most or share, share // parallel.stages), 0, -1):
        number, left = divmod(share, size)
        even = parallel.pp_schedule != "interleaved-1f1b" or number % max(1, number // parallel.pp) == 0
        if not left and (parallel.pp == 1 or even):
            return size
    return None
