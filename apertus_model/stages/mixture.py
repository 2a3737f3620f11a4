"""The `mixture` stage: an immutable sampling recipe over corpora.

Artifact: `recipe.json`, in this form (format 2):

    {"format": 2, "seed": 28, "tokenizer": fingerprint, "vocab_size": ..., "bos_id": ..., "eos_id": ...,
     "sources": [{"fingerprint": ..., "path": corpus artifact in the store, "weight": 3, "tokens": ...,
     "documents": ...}, ...]}

Invariants: the sources are corpora, each once, in the order of their fingerprints, independent of names; an
inner mixture is replaced by its sources, which share its weight. Weights are integers without a common
divisor, exactly in the ratio of the spec; under `proportional` they are the training tokens times the
factors. All corpora have one tokenizer. No token is read here.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, Store
from specs.errors import StageError
from specs.job import InputRef, Job
from specs.stages.mixture import MixturePart, integers

FORMAT = 2
IDS = ("tokenizer", "vocab_size", "bos_id", "eos_id")


class MixtureError(StageError):
    """Corpora that cannot be mixed."""


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. MixtureError when the corpora were tokenised with different tokenizers."""
    part = MixturePart.model_validate(job.spec)
    inputs = [job.inputs[f"source:{index}"] for index in range(len(part.weights))]
    weights: dict[str, Fraction] = {}
    found: dict[str, dict[str, Any]] = {}
    tokenizers: dict[str, str] = {}
    facts: dict[str, Any] = {}
    for ref, weight in zip(inputs, part.weights, strict=True):
        facts, sources = _sources(attempt.store, ref)
        tokenizers[facts["tokenizer"]] = ref.name
        total = sum(source["weight"] for source in sources)
        for source in sources:
            share = Fraction(weight * source["weight"], total) * (
                source["tokens"] if part.proportional else 1
            )
            weights[source["fingerprint"]] = weights.get(source["fingerprint"], Fraction(0)) + share
            found[source["fingerprint"]] = source
    if len(tokenizers) > 1:
        used = ", ".join(f"{name}: {fingerprint}" for fingerprint, name in tokenizers.items())
        raise MixtureError(
            f"the corpora were made with different tokenizers ({used}). Fix: the same `tokenizer:` in all of"
            " their stages"
        )
    order = sorted(weights)
    whole = integers([weights[fingerprint] for fingerprint in order])
    recipe = {
        "format": FORMAT,
        "seed": part.seed,
        "sources": [
            found[fingerprint] | {"weight": weight} for fingerprint, weight in zip(order, whole, strict=True)
        ],
        **{name: facts[name] for name in IDS},
    }
    attempt.write_json("recipe.json", recipe)
    shares = [weight / sum(whole) for weight in whole]
    names = {ref.fingerprint: ref.name for ref in inputs}
    progress.log(
        "; ".join(
            f"{names.get(corpus) or corpus[:8]} {share:.4f}"
            for corpus, share in zip(order, shares, strict=True)
        )
    )
    tokens = sum(source["tokens"] for source in found.values())
    attempt.commit(metrics={"sources": len(order), "shares": shares, "tokens": tokens})


def _sources(store: Store, ref: InputRef) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Token ids and sources of an input: those of a mixture's recipe, or the corpus itself with weight 1."""
    artifact = Artifact.of_input(store, ref)
    if ref.kind == "mixture":
        recipe = artifact.json("recipe.json")
        return recipe, recipe["sources"]
    counts = artifact.manifest.metrics["train"]
    source = {
        "fingerprint": ref.fingerprint,
        "path": ref.path,
        "weight": 1,
        "tokens": counts["tokens"],
        "documents": counts["documents"],
    }
    return artifact.manifest.facts, [source]
