"""Goldfish masks per second and core: `python -m benchmarks.goldfish`.

Beside ours: the form of the method's authors (windows unfolded, multiplied and
looked up by torch), and copying the labels, the limit for anything that reads and writes them once. One
thread; all take turns, so that a machine that slows down slows all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from apertus_model.data.tokens.goldfish import TABLE_SEED, TABLE_SIZE, goldfish_mask


def authors_mask(labels: torch.Tensor, table: torch.Tensor, k: int, h: int) -> torch.Tensor:
    """The published computation, window by window (arXiv 2406.10209)."""
    mask = torch.zeros(labels.shape, dtype=torch.bool)
    mask[..., h - 1 :] = table[labels.unfold(-1, h, 1).prod(-1) % TABLE_SIZE] < 1 / k
    return mask


def main() -> None:
    """Prints medians in million tokens per second, and the ratios to ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--length", type=int, default=4096, help="labels per row, as a data loader masks them"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rows", type=int, default=64, help="rows per round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    k = h = 50
    labels = np.random.default_rng(0).integers(0, 131_072, size=(options.rows, options.length))
    tensors = torch.from_numpy(labels)
    table = torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(TABLE_SEED))
    assert np.array_equal(goldfish_mask(labels, k, h), authors_mask(tensors, table, k, h).numpy())
    works: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "ours": (lambda row: goldfish_mask(row, k, h), labels),
        "authors' form, torch": (lambda row: authors_mask(row, table, k, h), tensors),
        "copy of the labels": (np.copy, labels),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, (work, rows) in works.items():
            begin = time.perf_counter()
            for row in rows:
                work(row)
            seconds[name].append(time.perf_counter() - begin)
    own = statistics.median(seconds["ours"])
    print(f"k = h = 50, rows of {options.length} labels, one thread, median of {options.rounds} rounds")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:>22} {labels.size / median / 1e6:9.1f} million tokens/s   {own / median:7.2f} times ours"
        )


if __name__ == "__main__":
    main()
