"""The `mixture` stage: an immutable sampling recipe over corpora.

Artifact: `recipe.json`, in this form (format 1):

    {"format": 1, "seed": 28, "tokenizer": fingerprint, "vocab_size": ..., "bos_id": ..., "eos_id": ...,
     "sources": [{"fingerprint": ..., "path": corpus artifact in the store, "weight": 3, "tokens": ..., "documents": ...}, ...]}

Invariants: weights are integers without a common divisor, equal to the spec's as written (0.7 is 7/10, not its nearest float); sources
stand in the order of the inputs, which names do not decide; all corpora were made with one tokenizer. No token is read here.
"""

from __future__ import annotations

from fractions import Fraction
from math import gcd, lcm
from typing import Any

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt
from specs.errors import StageError
from specs.job import Job
from specs.stages.mixture import MixturePart

FORMAT = 1


class MixtureError(StageError):
    """Corpora that cannot be mixed."""


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. MixtureError when the corpora were tokenised with different tokenizers."""
    part = MixturePart.model_validate(job.spec)
    inputs = [job.inputs[f"source:{index}"] for index in range(len(part.weights))]
    corpora = [Artifact(attempt.store, ref.path or "").manifest for ref in inputs]
    tokenizers = {corpus["facts"]["tokenizer"]: ref.name for corpus, ref in zip(corpora, inputs, strict=True)}
    if len(tokenizers) > 1:
        used = ", ".join(f"{name}: {fingerprint}" for fingerprint, name in tokenizers.items())
        raise MixtureError(f"the corpora were made with different tokenizers ({used}). Fix: the same `tokenizer:` in all of their stages")

    weights = exact_weights(part.weights)
    facts = corpora[0]["facts"]
    sources: list[dict[str, Any]] = [
        {
            "fingerprint": ref.fingerprint,
            "path": ref.path,
            "weight": weight,
            "tokens": corpus["metrics"]["train"]["tokens"],
            "documents": corpus["metrics"]["train"]["documents"],
        }
        for ref, weight, corpus in zip(inputs, weights, corpora, strict=True)
    ]
    recipe = {"format": FORMAT, "seed": part.seed, "sources": sources}
    recipe |= {name: facts[name] for name in ("tokenizer", "vocab_size", "bos_id", "eos_id")}
    attempt.write_json("recipe.json", recipe)
    shares = [weight / sum(weights) for weight in weights]
    progress.log("; ".join(f"{ref.name or ref.fingerprint} {share:.4f}" for ref, share in zip(inputs, shares, strict=True)))
    attempt.commit(metrics={"sources": len(sources), "shares": shares, "tokens": sum(source["tokens"] for source in sources)})


def exact_weights(weights: list[float]) -> list[int]:
    """The smallest integers in the ratio of the weights as they are written in decimal: [0.7, 0.2, 0.1] -> [7, 2, 1]."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    divisor = gcd(*integers)
    return [weight // divisor for weight in integers]
