"""Memory and time of the loss with the output projection, forward and backward: `python -m
benchmarks.cross_entropy`.

Beside ours: torch's cross-entropy of all logits, and torchtitan's chunked loss with chunks of as many tokens.
On CUDA the shape is that of the 8B model in bfloat16; on CPU a small one in float32. Every measurement is a
process of its own; peak memory is what it needs beyond hidden states and weight, from the allocator on CUDA,
from the operating system on CPU.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import apertus_model.trainer  # torchtitan's device  # noqa: F401
from apertus_model.losses.cross_entropy import LastStates, cross_entropy, log_probabilities
from specs.capabilities import CHUNK_TOKENS

Loss = Callable[[torch.Tensor, torch.nn.Linear, torch.Tensor, int], torch.Tensor]


def all_logits(
    hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor, tokens: int
) -> torch.Tensor:
    """As it is usually written."""
    return F.cross_entropy(head(hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum") / tokens


def titan(hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor, tokens: int) -> torch.Tensor:
    """torchtitan 0.3.0's."""
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")
    loss = ChunkedLossWrapper.Config(num_chunks=max(1, labels.numel() // CHUNK_TOKENS)).build()
    loss.set_lm_head(head)
    value: torch.Tensor = loss(hidden, labels, torch.tensor(tokens))[0]
    return value


LOSSES: dict[str, Loss] = {
    "torch, all logits": all_logits,
    "torchtitan, chunked": titan,
    "ours": lambda hidden, head, labels, tokens: cross_entropy(
        LastStates(hidden, head.weight, labels), tokens
    ),
    "ours, log-probabilities": lambda hidden, head, labels, tokens: (
        -log_probabilities(LastStates(hidden, head.weight, labels)).sum() / tokens
    ),
}


def measure(
    name: str, shape: tuple[int, int, int], device: str, dtype: torch.dtype, threads: int, answer: Any
) -> None:
    """Sends (seconds, bytes, loss) of the second of two passes."""
    torch.set_num_threads(threads)
    tokens, width, words = shape
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, width, device=device).to(dtype).requires_grad_()
    head = torch.nn.Linear(width, words, bias=False, device=device, dtype=dtype)
    labels = torch.randint(words, (1, tokens), device=device)
    gc.collect()
    before = peak(device)
    for _ in range(2):
        hidden.grad = head.weight.grad = None
        begin = time.perf_counter()
        loss = LOSSES[name](hidden, head, labels, tokens)
        loss.backward()
        value = loss.item()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    answer.send((seconds, peak(device) - before, value))


def peak(device: str) -> int:
    """Most bytes so far: of tensors on CUDA, of the process on CPU."""
    return (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


def main() -> None:
    """Prints medians, and the ratios to torch's cross-entropy of all logits."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=4096 if cuda else 512)
    parser.add_argument("--words", type=int, default=131_072 if cuda else 32_768)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if cuda else "float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device, shape = "cuda" if cuda else "cpu", (options.tokens, options.width, options.words)
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in LOSSES}
    for _ in range(options.rounds):
        for name in LOSSES:
            mine, theirs = context.Pipe()
            process = context.Process(
                target=measure,
                args=(name, shape, device, getattr(torch, options.dtype), options.threads, theirs),
            )
            process.start()
            theirs.close()
            found[name].append(mine.recv())
            process.join()
    print(
        f"{options.tokens} tokens, width {options.width}, {options.words} words, {options.dtype} on {device};"
        f" chunks of {CHUNK_TOKENS}"
    )
    medians = {
        name: [statistics.median(values) for values in zip(*results, strict=True)]
        for name, results in found.items()
    }
    seconds, memory, _ = medians["torch, all logits"]
    for name, (s, m, loss) in medians.items():
        print(
            f"{name:>24} {s:8.3f} s ({s / seconds:5.2f})   {m / 2**20:8.0f} MiB ({m / memory:5.2f})   loss"
            f" {loss:.6f}"
        )


if __name__ == "__main__":
    main()
