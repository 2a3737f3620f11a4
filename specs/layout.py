"""The requirements of a parallel layout on model, sequence and batch that the recipe alone decides.

Invariant: the engine runs every layout that passes here; `docs/parallelism.md` says how that was checked.
"""

from collections.abc import Iterator
from typing import NamedTuple

from specs.launch import Launch, Parallel
from specs.model import ModelSpec


class Misfit(NamedTuple):
    """A degree of parallelism that does not fit."""

    field: str  # of `parallel`
    message: str
    fix: str


def misfits(
    launch: Launch, model: ModelSpec, sequence_length: int | None = None, batch: int | None = None
) -> Iterator[Misfit]:
    """The degrees that the model, the longest sequence or the global batch does not allow."""
    parallel = launch.degrees
    tp, cp, stages = parallel.tp, parallel.cp, parallel.stages
    for name in ("n_kv_heads", "n_heads", "ffn_dim", "vocab_size"):
        if (size := getattr(model, name)) % tp:
            message = f"{name} {size} cannot be divided among {tp} tensor-parallel processes"
            yield Misfit("tp", message, f"use a divisor of {size}.")
            break
    if parallel.virtual_stages is not None and parallel.pp_schedule != "interleaved-1f1b":
        message = f"{parallel.pp_schedule} has one stage per process, not {parallel.virtual_stages}"
        fix = "set pp_schedule: interleaved-1f1b, or leave out virtual_stages."
        yield Misfit("virtual_stages", message, fix)
    if stages > 1 and model.method is not None:
        field, method = model.method
        yield Misfit("pp", f"model.{field} {method.PIPELINE}", "use pp: 1.")
    if cp > 1 and model.attention is not None:
        keys = "the keys of a whole sequence, and each process has only a part of it"
        message = f"model.attention (sparse: {model.attention.sparse}) chooses among {keys}"
        yield Misfit("cp", message, "use cp: 1.")
    if cp > 1 and model.mamba is not None:
        message = "model.mamba: the state of a layer goes through a whole sequence"
        yield Misfit("cp", f"{message}, and each process has a part", "use cp: 1.")
    if cp > 1 and model.method is not None and model.reads_earlier_keys:
        message = f"model.{model.method[0]}: layers read the keys of earlier passes"
        yield Misfit("cp", f"{message}, which context parallelism does not exchange", "use cp: 1.")
    if model.n_layers + 2 < 2 * stages:
        kind = f" ({stages // parallel.pp} per process)" if stages > parallel.pp else ""
        message = (
            f"{model.n_layers} layers are too few for a pipeline of {stages} stages{kind}: each stage needs "
            "two, counting embeddings and output as a layer each"
        )
        field = "pp" if parallel.virtual_stages is None else "virtual_stages"
        most = (model.n_layers + 2) // 2
        yield Misfit(field, message, f"use at most {most} stage{'s' if most > 1 else ''}.")
    if parallel.async_tp and (tp == 1 or not parallel.sequence_parallel):
        message = "async_tp splits the gathers and reduce-scatters of sequence parallelism, which is off"
        yield Misfit("async_tp", message, "set tp and sequence_parallel: true, or leave out async_tp.")
    pieces = (2 * cp if cp > 1 else 1) * (tp if parallel.sequence_parallel else 1)
    if sequence_length is not None and sequence_length % pieces:
        split = parallel.sequence_parallel and tp > 1
        how = f"cp {cp}" + (f" with sequence parallelism over tp {tp}" if split else "")
        message = f"sequence_length {sequence_length} is not a multiple of {pieces}, which {how} needs"
        field = "cp" if cp > 1 else "sequence_parallel"
        yield Misfit(field, message, "change the degree or sequence_length.")
    share = 0 if batch is None else batch // launch.data_parallel
    if share and micro_batch_size(parallel, share) is None:
        message = (
            f"a batch of {batch} sequences is {share} for each of {launch.data_parallel} data-parallel"
            f" pipelines, which cannot be split into micro-batches for {parallel.pp} processes"
            f" ({parallel.pp_schedule})"
        )
        fix = f"use a batch that gives each a multiple of {parallel.pp}, or a lower pp or fewer processes."
        yield Misfit("pp", message, fix)


def stage_layers(n_layers: int, stages: int) -> list[int]:
    """The number of layers of each pipeline stage, divided evenly: embeddings and output count as a layer
    each, and the remainder goes to the first stages."""
    each, more = divmod(n_layers + 2, stages)
    sizes = [each + (index < more) for index in range(stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return sizes


def micro_batch_size(parallel: Parallel, share: int, at_most: int | None = None) -> int | None:
    """Sequences per forward pass: the largest divisor of `share` that is at most `at_most`. A pipeline gets
    as many micro-batches as it has stages if there are enough sequences, and needs as many as it has
    processes; `interleaved-1f1b` needs rounds of equal length, of `pp` micro-batches or a few more. `share`:
    sequences of a step on each data-parallel rank. None when no size fits."""
    for size in range(min(at_most or share, max(1, share // parallel.stages)), 0, -1):
        number, left = divmod(share, size)
        even = parallel.pp_schedule != "interleaved-1f1b" or number % max(1, number // parallel.pp) == 0
        if not left and number >= parallel.pp and (parallel.pp == 1 or even):
            return size
    return None


def micro_batches_in_flight(parallel: Parallel, rank: int, micro_batches: int) -> list[int]:
    """The largest number of micro-batches that wait for their backward pass in each stage of a pipeline rank
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). `interleaved-1f1b` passes `pp` of them through a
    stage, then as many through the next."""
    pp, chunks = parallel.pp, parallel.stages // parallel.pp
    if pp == 1:
        return [1]
    if parallel.pp_schedule == "gpipe":
        return [micro_batches]
    if parallel.pp_schedule == "1f1b":
        return [min(micro_batches, pp - rank)]
    passes = min(micro_batches * chunks, 2 * (pp - rank - 1) + (chunks - 1) * pp + 1)
    return [sum(number // pp % chunks == chunk for number in range(passes)) for chunk in range(chunks)]


def backward_passes(parallel: Parallel, rank: int) -> Iterator[tuple[int, bool, list[int]]]:
    """The backward passes, in order, of a rank whose interleaved pipeline a batch fills once: the stage of
    each, whether it is the first of that stage, and the number of micro-batches that wait in each stage when
    it begins."""
    pp, chunks = parallel.pp, parallel.stages // parallel.pp
    ahead = sum(micro_batches_in_flight(parallel, rank, pp))
    for number in range(pp * chunks):
        forward = min(pp * chunks, ahead + number)
        waiting = [
            min(max(forward - pp * chunk, 0), pp) - min(max(number - pp * (chunks - 1 - chunk), 0), pp)
            for chunk in range(chunks)
        ]
        yield chunks - 1 - number // pp, number % pp == 0, waiting
