"""Recipes of mixtures of corpora that no stage has made."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from apertus_model.data.order.mixture_recipe import MixtureRecipe, MixtureSource
from apertus_model.data.tokens.megatron import HEADER_BYTES, read_header
from apertus_model.data.tokens.stream import TokenShard
from infra.store.reading.ranges import LocalFile


def recipe_of(
    weights: Mapping[str, int], *, vocab_size: int, seed: int = 28, eos_id: int = 2
) -> MixtureRecipe:
    """A recipe with these weights, by fingerprint of the corpus."""
    sources = [
        MixtureSource(fingerprint=name, path=f"corpus/{name}", weight=weight, tokens=0, documents=0)
        for name, weight in weights.items()
    ]
    return MixtureRecipe(
        seed=seed, sources=sources, tokenizer="t", vocab_size=vocab_size, bos_id=1, eos_id=eos_id
    )


def shards_of(paths: Sequence[Path], vocab_size: int = 2**31 - 1) -> list[TokenShard]:
    """The token files with these paths, without suffix, as the shards of a split."""
    files = [(LocalFile(f"{path}.bin"), LocalFile(f"{path}.idx")) for path in paths]
    dtype = read_header(Path(files[0][1].name).read_bytes()[:HEADER_BYTES], files[0][1].name).dtype
    return [TokenShard(data, index, dtype, vocab_size) for data, index in files]
