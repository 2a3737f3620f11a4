"""The `mixture` stage: an immutable sampling recipe over corpora.

Artifact: `recipe.json` (`apertus_model.data.order.mixture_recipe`).

Invariants: an inner mixture is replaced by its sources, which share its weight. Weights are exactly in the
ratio of the spec; under `proportional` they are the training tokens times the factors, under `learned` the
learned weights in millionths. All corpora have the same tokenizer. Names have no effect.
"""

from fractions import Fraction

from apertus_model.data.order.mixture_recipe import FILE, MixtureRecipe, MixtureSource
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, Store
from specs.errors import StageError
from specs.job import InputRef
from specs.stages.domain_weights import in_parts
from specs.stages.mixture import MixturePart, integers

IDS = ("tokenizer", "vocab_size", "bos_id", "eos_id")


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. StageError when the corpora were tokenised with different tokenizers."""
    part = MixturePart.model_validate(attempt.job.spec)
    inputs = [attempt.job.inputs[f"source:{index}"] for index in range(len(part.weights))]
    input_weights = part.weights
    if part.learned:
        trained = attempt.job.inputs["learned"]
        assert trained.path is not None, "the launcher gives the place"
        facts = Artifact(attempt.store, trained.path, trained.step).manifest.facts
        learned = in_parts(facts["domain_weights"]["mean"])
        input_weights = [learned[position] for position in part.learned]
    weights: dict[str, Fraction] = {}
    corpora: dict[str, MixtureSource] = {}
    tokenizers: dict[str, str] = {}
    for ref, weight in zip(inputs, input_weights, strict=True):
        inner = _recipe(attempt.store, ref)
        tokenizers[inner.tokenizer] = ref.name
        total = sum(source.weight for source in inner.sources)
        for source in inner.sources:
            share = Fraction(weight * source.weight, total) * (source.tokens if part.proportional else 1)
            weights[source.fingerprint] = weights.get(source.fingerprint, Fraction(0)) + share
            corpora[source.fingerprint] = source
    if len(tokenizers) > 1:
        used = ", ".join(f"{name}: {fingerprint}" for fingerprint, name in tokenizers.items())
        raise StageError(
            f"the corpora were made with different tokenizers ({used})."
            " Fix: set the same `tokenizer:` in all of their stages"
        )
    order = sorted(weights)
    whole = integers([weights[fingerprint] for fingerprint in order])
    sources = [
        corpora[corpus].model_copy(update={"weight": weight})
        for corpus, weight in zip(order, whole, strict=True)
    ]
    recipe = inner.model_copy(update={"seed": part.seed, "sources": sources})
    attempt.write_json(FILE, recipe.model_dump())
    shares = [weight / sum(whole) for weight in whole]
    names = {ref.fingerprint: ref.name for ref in inputs}
    shown = zip((names.get(corpus) or corpus[:8] for corpus in order), shares, strict=True)
    progress.log("; ".join(f"{name} {share:.4f}" for name, share in shown))
    tokens = sum(source.tokens for source in sources)
    attempt.commit(metrics={"sources": len(order), "shares": shares, "tokens": tokens})


def _recipe(store: Store, ref: InputRef) -> MixtureRecipe:
    """The recipe of an input: a mixture's own recipe, or a recipe of one corpus alone."""
    artifact = Artifact.of_input(store, ref)
    if ref.kind == "mixture":
        return artifact.document(FILE, MixtureRecipe)
    counts, facts = artifact.manifest.metrics["train"], artifact.manifest.facts
    sizes = {name: counts[name] for name in ("tokens", "documents")}
    source = MixtureSource(fingerprint=ref.fingerprint, path=artifact.path, weight=1, **sizes)
    return MixtureRecipe(seed=0, sources=[source], **{name: facts[name] for name in IDS})
