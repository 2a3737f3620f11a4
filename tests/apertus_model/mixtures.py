"""Recipes of mixtures of corpora that no stage has made."""

from collections.abc import Mapping

from apertus_model.data.order.mixture_recipe import MixtureRecipe, MixtureSource


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
