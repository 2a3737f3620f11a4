"""Counts the work of parts that evaluate a model: held-out text, probes, suites of tasks."""

from statistics import fmean
from typing import cast

from flows.format import is_number
from flows.planning.estimate import flops
from flows.planning.estimate.sampling_work import answers
from flows.planning.estimate.work import (
    SOURCES,
    Count,
    Decoding,
    Known,
    ModelWork,
    NotCounted,
    Number,
    SuiteRequests,
    weakest,
)
from flows.planning.graph import Node
from specs.capabilities import WIDTHS
from specs.model import ModelSpec
from specs.stages.base import Part
from specs.stages.corpus import CorpusPart
from specs.stages.evaluate import EvaluatePart
from specs.stages.harness import MOST_ROWS, REQUESTS_PER_UNIT, HarnessPart
from specs.stages.memorisation import ContinuationsPart
from specs.stages.probe import ProbePart


def _held_out(known: Known, node: Node, length: int, samples: int) -> list[Number]:
    """The number of held-out sequences of each source that a part reads."""
    sequences = []
    for role, input_ in node.inputs.items():
        if role.startswith("source:"):
            source = known.graph.nodes[input_.node or ""]
            manifest = known.manifest(source, same=True)
            held = manifest.metrics.get("validation") if manifest is not None else None
            exact = held is not None and source.kind == "corpus"
            rows = samples
            if held is not None:  # conversations are not cut, and may each have a row
                rows = min(samples, held["tokens"] // length if exact else held["conversations"])
            sequences.append(Number(rows, "measured" if exact else "at most"))
    return sequences


def _scored(known: Known, node: Node, model: ModelSpec, length: int, samples: int) -> ModelWork:
    rows = _held_out(known, node, length, samples)
    number = sum(count.value for count in rows)
    tokens = number * length
    source = weakest([count.source for count in rows] or [SOURCES[0]])
    return ModelWork(number, tokens, 0, flops.scored(model, tokens, length), source=source)


def _evaluation(known: Known, node: Node) -> ModelWork | None:
    part = cast(EvaluatePart, node.part)
    if part.model is None:  # the parts before it ask a model of another architecture
        return None
    work = _scored(known, node, part.model, part.sequence_length, part.samples)
    if by := part.by_position:
        work += _scored(known, node, part.model, by.sequence_length, by.samples)
    if part.memorisation and part.memorisation.exposure and part.canaries:
        texts = part.canaries.count * min(part.memorisation.exposure.alternatives + 1, part.canaries.space)
        length = part.canaries.longest  # a token has a byte or more
        operations = flops.scored(part.model, texts * length, length)
        work += ModelWork(texts, texts * length, 0, operations, source="at most")
    if "completions" in node.inputs and part.against_model is not None:
        work += _divergence(known, node, (part.model, part.against_model))
    return work if work.requests else None


def _continuations(known: Known, node: Node) -> ModelWork:
    """The work of continuing every probe from each prefix at each offset."""
    part, model = cast(ContinuationsPart, node.part), known.model(node)
    probes = _probes(known, known.input(node, "probes"), part.planted)
    each, new = probes.value * len(part.offsets), part.sampling.max_new_tokens
    requests, prefix = each * len(part.prefixes), fmean(part.prefixes)
    own = part.sampling.engine == "transformers"
    return ModelWork(
        requests=requests,
        read_tokens=requests * prefix,
        sampled_tokens=requests * new,
        forward_flops=round(each * sum(flops.prefill(model.model, length) for length in part.prefixes)),
        decode_flops=round(each * sum(flops.decode(model.model, length, new) for length in part.prefixes)),
        source=probes.source,
        width=WIDTHS[model.dtype] if own else WIDTHS["bfloat16"],
        decoding=Decoding(model.model, requests, part.sampling.batch_size, prefix, new),
    )


def _probes(known: Known, corpus: Node, name: str | None) -> Number:
    """The number of probes of a corpus: those of `repeats`, or the documents planted under a name."""
    process, manifest = cast(CorpusPart, corpus.part).process, known.manifest(corpus, same=True)
    metrics = manifest.metrics if manifest is not None else {}
    planted = metrics.get("planted", {}).get(name, {}).get("documents")
    if isinstance(stored := metrics.get("probes") if name is None else planted, int):
        return Number(stored, "measured")
    if name is not None and (canaries := process.planted[name].canaries) is not None:
        return Number(canaries.count, "declared")
    if name is not None or process.repeats is None:
        raise NotCounted("planted documents (before the corpus is built)")
    return Number(len(process.repeats.buckets) * process.repeats.per_bucket, "declared")


def _divergence(known: Known, node: Node, models: tuple[ModelSpec, ModelSpec]) -> ModelWork:
    """The work of both models, which read the answers of the first."""
    sequences, tokens = answers(known, known.input(node, "completions"))
    tokens_read = sequences.value * tokens.value
    length = max(1, round(tokens.value))
    operations = sum(flops.scored(model, tokens_read, length) for model in models)
    source = weakest([sequences.source, tokens.source])
    return ModelWork(sequences.value, 2 * tokens_read, 0, operations, source=source)


def _harness(known: Known, node: Node) -> ModelWork:
    """The work of a suite: its stored requests, else the declared ones, with the declared length or with that
    in the suite's last run, which may have asked only a sample."""
    part, model = cast(HarnessPart, node.part), known.model(node)
    stored = _asked(known, node, same=True)
    asked = stored or _expected(known, node)
    tokens, new = asked.read_tokens / asked.requests, asked.sampled_tokens / asked.requests
    at_once = MOST_ROWS if part.engine == "transformers" else REQUESTS_PER_UNIT["generate_until"]
    return ModelWork(
        requests=asked.requests,
        read_tokens=asked.read_tokens,
        sampled_tokens=asked.sampled_tokens,
        forward_flops=flops.scored(model.model, asked.read_tokens, tokens),
        decode_flops=round(asked.requests * flops.decode(model.model, tokens, new)),
        source="measured" if stored else "declared",
        width=WIDTHS[model.dtype if part.engine == "transformers" else "bfloat16"],
        decoding=Decoding(model.model, asked.requests, at_once, tokens, new) if new else None,
    )


def _expected(known: Known, node: Node) -> SuiteRequests:
    expected, last = cast(HarnessPart, node.part).suite.expected, _asked(known, node)
    if expected is None:
        raise NotCounted("requests (expected of the suite)")
    number = expected.requests
    if expected.tokens is not None:
        return SuiteRequests(number, number * expected.tokens, number * expected.new_tokens)
    if last is None:
        raise NotCounted("tokens of requests (expected.tokens of the suite)")
    scale = number / last.requests
    return SuiteRequests(number, last.read_tokens * scale, last.sampled_tokens * scale)


def _asked(known: Known, node: Node, *, same: bool = False) -> SuiteRequests | None:
    """The recorded requests of a stored suite, and their tokens; None if it had no requests, or if one of the
    numbers is missing."""
    manifest = known.manifest(node, same=same)
    asked = manifest.facts.get("asked") if manifest is not None else None
    if not isinstance(asked, dict) or not all(is_number(asked.get(name)) for name in SuiteRequests._fields):
        return None
    return SuiteRequests(*(asked[name] for name in SuiteRequests._fields)) if asked["requests"] else None


def _probe(known: Known, node: Node) -> ModelWork:
    """The work of one pass for the loss and, for every vector, of two passes with three times as many
    operations each."""
    part = cast(ProbePart, node.part)
    work, vectors = (
        _scored(known, node, part.model, part.sequence_length, part.samples),
        part.sharpness.probes if part.sharpness else 0,
    )
    return work._replace(
        read_tokens=work.read_tokens * (1 + 2 * vectors), forward_flops=work.forward_flops * (1 + 6 * vectors)
    )


EVALUATION: dict[type[Part], Count] = {
    EvaluatePart: _evaluation,
    HarnessPart: _harness,
    ContinuationsPart: _continuations,
    ProbePart: _probe,
}
