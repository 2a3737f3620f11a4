"""What share of the labels the Goldfish hash really leaves out, and why it is not 1/k: `python -m
benchmarks.goldfish_share`.

The hash of a window is the product of its h ids modulo 2^64, so it is not spread evenly over the table: a
product with 64 factors of two or more is 0, always the same entry; with v of them it is one of 2^(63-v)
values. How often that happens depends on which frequent ids are even, so on the vocabulary and the text.
Measured on rows of 4,096 labels, windows across documents, as in pretraining:

    uniform      ids uniform in the vocabulary
    Zipf         the n-th id after those of special tokens with probability 1/n: frequent ids first, as a
                 tokenizer makes them
    text, code   installed documentation and Python files under a byte-level BPE that is trained on them, with
                 1,000 ids in front for
                 special tokens, then the 256 bytes in their order, then merges, as we take the vocabulary of
                 Mistral-Nemo and Apertus to be
    ... permuted the same with the ids of the vocabulary permuted at random: what another vocabulary may bring

Everything is computed in the form of the method's authors, by torch: unfolded windows, their products, a
table of `torch.rand`; nothing of `apertus_model` but the table's seed and size is used. Measured text is what
the BPE was trained on.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from apertus_model.data.tokens.goldfish import TABLE_SEED, TABLE_SIZE
from apertus_model.tokenizer_files import open_tokenizer

VOCABULARY = 131_072
RESERVED = 1000
BEGIN, END = 1, 2
MANY = 44  # factors of two from which a hash has at most 2^19 values


def share(labels: NDArray[np.int64], k: int, h: int) -> tuple[float, ...]:
    """Shares of rows of labels, (rows, length) int64: left out; of all windows those with hash 0, with
    many factors of two, with few; and left out of the last two (of windows with hash 0 all or none are)."""
    table = torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(TABLE_SEED))
    kinds, left = np.zeros(3), np.zeros(3)
    for row in torch.from_numpy(labels):
        product = row.unfold(-1, h, 1).prod(-1)
        dropped = (table[product % TABLE_SIZE] < 1 / k).numpy()
        bits = product.numpy()
        kind = np.where(bits == 0, 0, np.where(bits & ((1 << MANY) - 1) == 0, 1, 2))
        kinds += np.bincount(kind, minlength=3)
        left += np.bincount(kind, weights=dropped, minlength=3)
    return (left.sum() / labels.size, *(kinds / kinds.sum()), *(left[1:] / np.maximum(kinds[1:], 1)))


def installed(suffixes: tuple[str, ...], limit: int) -> Iterator[str]:
    """Installed files, in an order of their own that is always the same, up to `limit` bytes."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    found = {path for root in roots for path in root.rglob("*") if path.suffix in suffixes and path.is_file()}
    files = sorted(found, key=lambda path: (path.name, path))
    for path in np.random.default_rng(0).permutation(np.array(files, dtype=object)):
        text = path.read_bytes()[:200_000].decode(errors="ignore")
        limit -= len(text)
        if limit < 0:
            return
        yield text


def trained(texts: list[str]) -> tuple[Tokenizer, NDArray[np.int64]]:
    """A byte-level BPE with `VOCABULARY` ids, and what its ids are to be replaced by: the trainer sorts
    bytes by the characters that stand for them, a byte's own value decides here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [f"<reserved-{number}>" for number in range(RESERVED)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    order = np.arange(VOCABULARY)
    for letter, value in bytes_by_letter().items():
        order[tokenizer.token_to_id(letter)] = RESERVED + value
    return tokenizer, order


def rows(tokenizer: Tokenizer, texts: list[str], length: int, most: int) -> NDArray[np.int64]:
    """Labels of documents one after the other, each between its markers: (rows, length) int64, `most` rows
    at most."""
    ids: list[int] = []
    for text in texts:
        ids += [BEGIN, *tokenizer.encode(text, add_special_tokens=False).ids, END]
        if len(ids) > most * length:
            break
    found = np.array(ids, dtype=np.int64)
    return found[: min(most, len(found) // length) * length].reshape(-1, length)


def bytes_by_letter() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level BPE, as GPT-2 has them: printable ones for
    themselves, others from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in own]
    return {chr(value): value for value in own} | {
        chr(256 + index): value for index, value in enumerate(others)
    }


def main() -> None:
    """Prints a line per kind of ids."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument(
        "--tokenizer", help="a tokenizer.json with as many ids, in place of the one that is trained here"
    )
    parser.add_argument("--megabytes", type=int, default=40, help="of text, and of code")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape, generator = (options.rows, options.length), np.random.default_rng(0)
    k = h = 50
    print(
        f"k = h = 50, rows of {options.length} labels; shares of windows by their hash, and of labels"
        " left out"
    )
    print(
        f"{'':>16} {'labels':>11} {'hash 0':>8} {'many 2s':>8} {'left out':>9} {'few 2s':>8} {'left out':>9}"
        f" {'of all labels':>14}"
    )

    def show(name: str, labels: NDArray[np.int64]) -> None:
        whole, zero, many, few, of_many, of_few = (f"{value:.2%}" for value in share(labels, k, h))
        print(
            f"{name:>16} {labels.size:>11,} {zero:>8} {many:>8} {of_many:>9} {few:>8} {of_few:>9}"
            f" {whole:>14}",
            flush=True,
        )

    show("uniform", generator.integers(0, VOCABULARY, size=shape))
    harmonic = np.cumsum(1 / np.arange(1, VOCABULARY - RESERVED + 1))
    kinds = {
        "Zipf": RESERVED + np.searchsorted(harmonic, generator.random(shape) * harmonic[-1]).astype(np.int64)
    }
    suffixes = {"text": (".md", ".rst", ".txt"), "code": (".py",)}
    texts = {name: list(installed(of_kind, options.megabytes * 10**6)) for name, of_kind in suffixes.items()}
    if options.tokenizer:
        tokenizer, order = open_tokenizer(Path(options.tokenizer)), np.arange(VOCABULARY)
    else:
        tokenizer, order = trained([text for kind in texts.values() for text in kind])
    kinds |= {
        name: order[rows(tokenizer, documents, options.length, options.rows)]
        for name, documents in texts.items()
    }
    for name, labels in kinds.items():
        show(name, labels)
        for number in range(3):
            show(
                f"{name}, permuted {number + 1}",
                np.random.default_rng(number).permutation(VOCABULARY)[labels],
            )


if __name__ == "__main__":
    main()
