"""Loss on held-out text: per source, by position in the document, and forgetting.

Metrics:

    perplexity/<source>, perplexity         exp of the mean loss per token, in conversations per token of the
                                            answers: of a source, and over the tokens of all
    loss/position/<p>                       mean loss, in nats, at positions from p to the next bucket, over
                                            all sources
    forgetting/<source>, forgetting         rise of the loss per token, in nats, since the evaluation named
                                            by `against`: of a source, and over the tokens of all
"""

import math
from collections.abc import Mapping, Sequence

from apertus_model.data.conversations import samples as conversations
from apertus_model.data.conversations.stored import ConversationShards
from apertus_model.data.order.samples import ValidationSamples
from apertus_model.data.tokens.stream import split_shards
from apertus_model.progress import Progress
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.loader import SampleLike
from infra.store import Artifact
from specs.errors import StageError
from specs.stages.evaluate import ByPosition


def held_out(source: Artifact, *, sequence_length: int, samples: int) -> list[SampleLike]:
    """The first held-out sequences of a corpus, or rows of conversations that fit, at most `samples`.
    StageError when there is none."""
    if source.identity.kind == "conversations":
        shards = ConversationShards(source, "validation")
        pad_id = source.manifest.facts["pad_id"]
        rows = conversations.heldout([shards], sequence_length=sequence_length, longer="drop", pad_id=pad_id)
        if not rows:
            raise _nothing(source, f"no conversation of at most {sequence_length} tokens")
        return list(rows[:samples])
    facts, files = source.manifest.facts, split_shards(source, "validation")
    if not files:
        raise _nothing(source, "no document")
    sequences = ValidationSamples([files], eos_id=facts["eos_id"], sequence_length=sequence_length)
    return [sequences[i] for i in range(min(samples, len(sequences)))]


def _nothing(source: Artifact, what: str) -> StageError:
    return StageError(
        f"'{source.identity.name}' holds out {what}, so there is nothing to evaluate on."
        " Fix: set its holdout, or leave it out of sources"
    )


def perplexity(
    evaluator: Evaluator,
    sources: Mapping[str, Artifact],
    *,
    sequence_length: int,
    samples: int,
    progress: Progress,
) -> dict[str, float]:
    """Perplexity of each source, by name, and over all their tokens."""
    metrics: dict[str, float] = {}
    nats, tokens = 0.0, 0
    for index, (name, source) in enumerate(sources.items()):
        loss = evaluator.loss(held_out(source, sequence_length=sequence_length, samples=samples))
        metrics[f"perplexity/{name}"] = math.exp(loss.nats)
        nats += loss.nats * loss.tokens
        tokens += loss.tokens
        progress.update(index + 1, len(sources), "sources")
    return metrics | {"perplexity": math.exp(nats / tokens)}


def loss_by_position(
    evaluator: Evaluator, sources: Sequence[Artifact], positions: ByPosition
) -> dict[str, float]:
    """Mean loss by position in the document, of buckets in which a held-out document has a label."""
    edges = positions.edges
    totals = [(0.0, 0)] * positions.buckets
    for source in sources:
        sequences = held_out(source, sequence_length=positions.sequence_length, samples=positions.samples)
        of_source = evaluator.loss_by_position(sequences, edges)
        totals = [
            (nats + more, tokens + count)
            for (nats, tokens), (more, count) in zip(totals, of_source, strict=True)
        ]
    means = {edge: nats / tokens for edge, (nats, tokens) in zip(edges, totals, strict=False) if tokens}
    return {f"loss/position/{edge}": mean for edge, mean in means.items()}


def forgetting(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Rise of the loss of every source that both measured, and over all if both measured the same ones."""
    own, other = ({name for name in of if name.startswith("perplexity/")} for of in (now, before))
    names = [name for name in now if name in own & other or (name == "perplexity" and own == other)]
    return {
        name.replace("perplexity", "forgetting", 1): math.log(now[name]) - math.log(before[name])
        for name in names
    }
