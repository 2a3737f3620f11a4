"""What a part that samples or scores asks of its model: requests, tokens and FLOPs.

Numbers come from stored results of the part, or of the last run's part with its name (`measured`); from the
recipe (`declared`); or are the most that its settings allow (`at most`).

Invariant: a number that nothing states is not guessed: the part is then not counted and says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import NamedTuple, cast

from flows.planning.estimate import flops
from flows.planning.graph import Graph, Node
from flows.planning.run_records import Records
from infra.store import Artifact, Store, StoreError
from infra.store.documents import Manifest
from infra.store.hugging_face import stored_model
from specs.model import ModelSpec
from specs.stages.base import Part
from specs.stages.conversations import ConversationsPart
from specs.stages.corpus import CorpusPart
from specs.stages.distill import TeacherTokensPart
from specs.stages.evaluate import EvaluatePart
from specs.stages.evaluate_reward import EvaluateRewardPart
from specs.stages.export import ExportPart
from specs.stages.harness import MOST_ROWS, REQUESTS_PER_UNIT, HarnessPart
from specs.stages.memorisation import ContinuationsPart
from specs.stages.model_folder import ModelFolderPart
from specs.stages.preference_data import (
    CompletionsPart,
    LogProbabilitiesPart,
    PairsPart,
    PromptsPart,
    RewardsPart,
)
from specs.stages.probe import ProbePart

SOURCES = ("measured", "declared", "files", "at most")  # the least certain last
WIDTH = {"bfloat16": 2, "float32": 4}


class Number(NamedTuple):
    """A number and its source, one of `SOURCES`."""

    value: float
    source: str


class Decoding(NamedTuple):
    """Completions with a key-value cache, by one replica of a model on GPUs of a node."""

    model: ModelSpec
    sequences: float
    in_flight: int  # at most so many at a time
    prompt: float  # mean tokens
    tokens: float  # steps of a sequence


class Work(NamedTuple):
    """What one part asks of its model."""

    requests: float = 0  # prompts, sequences or rows
    read: float = 0  # tokens of forward passes, prefill included
    sampled: float = 0  # tokens
    forward_flops: int = 0
    decode_flops: int = 0
    source: str = SOURCES[0]
    width: int = 4  # bytes of an element in matrix products
    decoding: Decoding | None = None
    missing: str = ""  # what is not counted

    def __add__(self, other: Work) -> Work:  # type: ignore[override]  # a sum of fields, not of tuples
        """Both, one after the other, with the width of the first."""
        return self._replace(
            requests=self.requests + other.requests,
            read=self.read + other.read,
            sampled=self.sampled + other.sampled,
            forward_flops=self.forward_flops + other.forward_flops,
            source=weakest([self.source, other.source]),
        )


class Asked(NamedTuple):
    """Requests of a suite of tasks and their tokens, in all."""

    requests: float
    read_tokens: float
    sampled_tokens: float


class NotCounted(Exception):
    """The message names the numbers that nothing states."""


def weakest(sources: Iterable[str]) -> str:
    return max(sources, key=SOURCES.index)


class Counter:
    """Counts the work of the parts of a plan."""

    def __init__(self, graph: Graph, store: Store, records: Records) -> None:
        self.graph, self.store, self.records = graph, store, records

    def work(self, node: Node) -> Work | None:
        """None for a part that asks no model."""
        counters: dict[type[Part], Callable[[Node], Work | None]] = {
            CompletionsPart: self._completions,
            RewardsPart: self._rewards,
            EvaluateRewardPart: self._labelled_pairs,
            LogProbabilitiesPart: self._log_probabilities,
            TeacherTokensPart: self._teacher_tokens,
            EvaluatePart: self._evaluation,
            HarnessPart: self._harness,
            ContinuationsPart: self._continuations,
            ProbePart: self._probe,
        }
        count = counters.get(type(node.part))
        if count is None:
            return None
        try:
            return count(node)
        except NotCounted as error:
            return Work(missing=str(error))

    def manifest(self, node: Node, *, same: bool = False) -> Manifest | None:
        """Of the stored result of a part, or, unless `same`, of the part with its name in the last run; None
        without one, or where it is damaged."""
        last = None if same else self.records.last(node.name)
        for path in [node.path, *([last.path] if last is not None else [])]:
            try:
                artifact = Artifact(self.store, path)
                if artifact.complete:
                    return artifact.manifest
            except StoreError:
                continue
        return None

    def _metric(self, node: Node, name: str, *, same: bool = False) -> float | None:
        manifest = self.manifest(node, same=same)
        value = manifest.metrics.get(name) if manifest is not None else None
        return float(value) if isinstance(value, (int, float)) else None

    def _input(self, node: Node, role: str) -> Node:
        return self.graph.nodes[node.inputs[role].node or ""]

    def _model(self, node: Node) -> ExportPart:
        """The exported model that a part asks."""
        read = node.inputs.get("model")
        part = self.graph.nodes[read.node or ""].part if read is not None else None
        if not isinstance(part, ExportPart):
            raise NotCounted("a model that is not exported here")
        return part

    # Prompts and completions.

    def _prompts(self, node: Node) -> Number:
        """How many prompts a part with `prompts` has."""
        part = cast(PromptsPart, node.part)
        if (stored := self._metric(node, "prompts", same=True)) is not None:
            return Number(stored, "measured")
        read = [self.graph.nodes[read.node or ""] for role, read in node.inputs.items() if "conv" in role]
        try:
            counts = [self._conversations(source, part.split) for source in read]
        except NotCounted:
            if part.limit is None:
                raise
            return Number(part.limit, "at most")
        whole = sum(count.value for count in counts)
        if part.limit is not None and part.limit < whole:
            return Number(part.limit, "at most")
        return Number(whole, weakest(count.source for count in counts))

    def _conversations(self, node: Node, split: str) -> Number:
        part, manifest = cast(ConversationsPart, node.part), self.manifest(node, same=True)
        if manifest is not None and (found := manifest.metrics.get(split)):
            return Number(found["conversations"], "at most")
        declared = part.source.declared
        if declared is None or declared.documents is None:
            raise NotCounted(f"conversations of {node.name}")
        process = part.process
        share = process.holdout if split == "validation" else 1 - process.holdout
        kept = min(declared.documents * (process.share or 1), process.count or declared.documents)
        return Number(round(kept * share), "declared")

    def _sizes(self, node: Node) -> tuple[Number, Number]:
        """Mean tokens of a prompt and of a completion, of a part with completions."""
        sampling = cast(CompletionsPart, node.part).sampling
        prompts = self._input(node, "prompts")
        limits = cast(PromptsPart, prompts.part)
        prompt = Number(limits.max_tokens - limits.max_new_tokens, "at most")
        if sampling.expected_prompt_tokens is not None:
            prompt = Number(sampling.expected_prompt_tokens, "declared")
        tokens, number = self._metric(prompts, "prompt_tokens"), self._metric(prompts, "prompts")
        if tokens is not None and number:
            prompt = Number(tokens / number, "measured")
        completion = Number(sampling.max_new_tokens, "at most")
        if sampling.expected_tokens is not None:
            completion = Number(sampling.expected_tokens, "declared")
        if (mean := self._metric(node, "mean_tokens")) is not None:
            completion = Number(mean, "measured")
        return prompt, completion

    def _completions(self, node: Node) -> Work:
        """vLLM reads a prompt once for all of its completions, transformers once for each; greedy ones are
        computed once by transformers, and copied."""
        sampling = cast(CompletionsPart, node.part).sampling
        model = self._model(node)
        own = sampling.engine == "transformers"
        prompts, (prompt, completion) = self._prompts(self._input(node, "prompts")), self._sizes(node)
        each = 1 if own and sampling.greedy else sampling.n
        sequences, reads = prompts.value * each, prompts.value * (each if own else 1)
        return Work(
            requests=sequences,
            read=reads * prompt.value,
            sampled=sequences * completion.value,
            forward_flops=round(reads * flops.prefill(model.model, prompt.value)),
            decode_flops=round(sequences * flops.decode(model.model, prompt.value, completion.value)),
            source=weakest([prompts.source, prompt.source, completion.source]),
            width=WIDTH[model.dtype] if own else WIDTH["bfloat16"],
            decoding=Decoding(
                model.model,
                sequences,
                sampling.batch_size * each,
                prompt.value,
                # a batch of transformers ends with its longest completion
                sampling.max_new_tokens if own else completion.value,
            ),
        )

    def _answers(self, completions: Node) -> tuple[Number, Number]:
        """Sequences of prompts with their sampled completions, and their mean tokens."""
        sampling = cast(CompletionsPart, completions.part).sampling
        prompts, sizes = self._prompts(self._input(completions, "prompts")), self._sizes(completions)
        tokens = Number(sum(size.value for size in sizes), weakest(size.source for size in sizes))
        return prompts._replace(value=prompts.value * sampling.n), tokens

    def _rewards(self, node: Node) -> Work | None:
        """A model reads every completion after its prompt: two operations per parameter and token. A judge
        reads what all its questions begin with once, and two completions for a comparison."""
        reward, prompts = cast(RewardsPart, node.part).reward, self._input(node, "prompts")
        if reward.function is not None:
            return None
        parameters, width = self._reward_model(node)
        sequences, tokens = self._answers(self._input(node, "completions"))
        count, read, missing = sequences.value, sequences.value * tokens.value, ""
        sources = [sequences.source, tokens.source]
        for role in node.inputs:
            if role.startswith("generated:"):
                others, each = self._answers(self._input(node, role))
                count, read = count + others.value, read + others.value * each.value
                sources += [others.source, each.source]
        if cast(PromptsPart, prompts.part).offline:
            offline = self._metric(prompts, "completions", same=True)
            count, read = count + (offline or 0), read + (offline or 0) * tokens.value
            missing = "" if offline is not None else "offline completions"
        if reward.judge is not None and reward.judge.pairwise is not None:
            best = reward.judge.pairwise.best
            compared = best * (best - 1) * self._prompts(prompts).value
            count, read = count + compared, read + 2 * compared * tokens.value
        return Work(
            requests=count,
            read=read,
            forward_flops=round(2 * parameters * read),
            source=weakest(sources),
            width=width,
            missing=missing,
        )

    def _labelled_pairs(self, node: Node) -> Work | None:
        if cast(EvaluateRewardPart, node.part).reward.function is not None:
            return None
        raise NotCounted("labelled pairs and their lengths")

    def _reward_model(self, node: Node) -> tuple[float, int]:
        """Parameters of the model that scores, and bytes of each: by the size of its files, or as
        declared."""
        reward = cast(RewardsPart, node.part).reward
        if reward.judge is not None and reward.judge.server is not None:
            raise NotCounted("the model of a server")
        if reward.from_ is not None or reward.judge is not None:
            scorer = self._input(node, "judge" if reward.judge is not None else "reward_model").part
            if isinstance(scorer, ExportPart):
                return scorer.model.parameters, WIDTH[scorer.dtype]
            folder = cast(ModelFolderPart, scorer)
            width = stored_model(folder.url).width
            if width is not None and folder.weight_bytes:
                return folder.weight_bytes / width, width
        listing = self.graph.listings.get(f"{node.stage}.reward")
        width = stored_model(listing.url).width if listing is not None else None
        if listing is not None and width is not None:
            held = sum(file.size for file in listing.files if file.path.endswith(".safetensors"))
            return held / width, width
        if reward.parameters is None:
            raise NotCounted("parameters (reward.parameters)")
        return reward.parameters, WIDTH["bfloat16"]

    def _log_probabilities(self, node: Node) -> Work:
        """The packed rows of the pairs: two sequences each."""
        part, pairs = cast(LogProbabilitiesPart, node.part), self._input(node, "pairs")
        if not isinstance(pairs.part, PairsPart):
            raise NotCounted("completions with rewards")
        completions = self._input(pairs, "completions")
        prompts = self._prompts(self._input(completions, "prompts"))
        _, tokens = self._answers(completions)
        sequences = Number(2 * pairs.part.pairs * prompts.value, prompts.source)
        if (stored := self._metric(node, "sequences", same=True)) is not None:
            sequences = Number(stored, "measured")
        each = min(tokens.value, pairs.part.max_tokens)
        rows = -(-sequences.value * each // part.sequence_length)
        return Work(
            requests=sequences.value,
            read=rows * part.sequence_length,
            forward_flops=flops.scored(part.model, rows * part.sequence_length, part.sequence_length),
            source=weakest([sequences.source, tokens.source]),
            width=WIDTH[part.precision.param],
        )

    def _teacher_tokens(self, node: Node) -> Work:
        part = cast(TeacherTokensPart, node.part)
        tokens = part.samples * part.sequence_length
        operations = flops.scored(part.model, tokens, part.sequence_length)
        return Work(part.samples, tokens, 0, operations, width=WIDTH[part.precision.param])

    # Evaluation.

    def _held_out(self, node: Node, length: int, samples: int) -> list[Number]:
        """Held-out sequences of each source of a part that reads some."""
        found = []
        for role, read in node.inputs.items():
            if role.startswith("source:"):
                corpus = self.graph.nodes[read.node or ""]
                manifest = self.manifest(corpus, same=True)
                held = manifest.metrics.get("validation") if manifest is not None else None
                exact = held is not None and isinstance(corpus.part, CorpusPart)
                rows = min(samples, held["tokens"] // length) if held is not None else samples
                found.append(Number(rows, "measured" if exact else "at most"))
        return found

    def _scored(self, node: Node, model: ModelSpec, length: int, samples: int) -> Work:
        rows = self._held_out(node, length, samples)
        number = sum(count.value for count in rows)
        tokens = number * length
        source = weakest([count.source for count in rows] or [SOURCES[0]])
        return Work(number, tokens, 0, flops.scored(model, tokens, length), source=source)

    def _evaluation(self, node: Node) -> Work | None:
        part = cast(EvaluatePart, node.part)
        if part.model is None:  # the parts before it ask a model of another architecture
            return None
        work = self._scored(node, part.model, part.sequence_length, part.samples)
        if by := part.by_position:
            work += self._scored(node, part.model, by.sequence_length, by.samples)
        if part.memorisation and part.memorisation.exposure and part.canaries:
            texts = part.canaries.count * min(
                part.memorisation.exposure.alternatives + 1, part.canaries.space
            )
            length = part.canaries.longest  # a token has a byte or more
            operations = flops.scored(part.model, texts * length, length)
            work += Work(texts, texts * length, 0, operations, source="at most")
        if "completions" in node.inputs and part.against_model is not None:
            work += self._divergence(node, (part.model, part.against_model))
        return work if work.requests else None

    def _continuations(self, node: Node) -> Work:
        """Every probe is continued from each prefix at each offset."""
        part, model = cast(ContinuationsPart, node.part), self._model(node)
        probes = self._probes(self._input(node, "probes"), part.planted)
        each, new = probes.value * len(part.offsets), part.sampling.max_new_tokens
        requests, prefix = each * len(part.prefixes), fmean(part.prefixes)
        own = part.sampling.engine == "transformers"
        return Work(
            requests=requests,
            read=requests * prefix,
            sampled=requests * new,
            forward_flops=round(each * sum(flops.prefill(model.model, length) for length in part.prefixes)),
            decode_flops=round(
                each * sum(flops.decode(model.model, length, new) for length in part.prefixes)
            ),
            source=probes.source,
            width=WIDTH[model.dtype] if own else WIDTH["bfloat16"],
            decoding=Decoding(model.model, requests, part.sampling.batch_size, prefix, new),
        )

    def _probes(self, corpus: Node, name: str | None) -> Number:
        """Probes of a corpus: those of `repeats`, or the documents that are planted under a name."""
        process, manifest = cast(CorpusPart, corpus.part).process, self.manifest(corpus, same=True)
        made = manifest.metrics if manifest is not None else {}
        made = (
            {"probes": made.get("planted", {}).get(name, {}).get("documents")} if name is not None else made
        )
        if isinstance(stored := made.get("probes"), int):
            return Number(stored, "measured")
        if name is not None and (canaries := process.planted[name].canaries) is not None:
            return Number(canaries.count, "declared")
        if name is not None or process.repeats is None:
            raise NotCounted("planted documents (before the corpus is built)")
        return Number(len(process.repeats.buckets) * process.repeats.per_bucket, "declared")

    def _divergence(self, node: Node, models: tuple[ModelSpec, ModelSpec]) -> Work:
        """Both models read the answers of the first."""
        sequences, tokens = self._answers(self._input(node, "completions"))
        read = sequences.value * tokens.value
        length = max(1, round(tokens.value))
        operations = sum(flops.scored(model, read, length) for model in models)
        source = weakest([sequences.source, tokens.source])
        return Work(sequences.value, 2 * read, 0, operations, source=source)

    def _harness(self, node: Node) -> Work:
        """The requests of a stored suite, else those declared, of the declared length or of that in the
        suite's last run, which may have asked a sample."""
        part, model = cast(HarnessPart, node.part), self._model(node)
        stored = self._asked(node, same=True)
        asked = stored or self._expected(node)
        tokens, new = asked.read_tokens / asked.requests, asked.sampled_tokens / asked.requests
        at_once = MOST_ROWS if part.engine == "transformers" else REQUESTS_PER_UNIT["generate_until"]
        return Work(
            requests=asked.requests,
            read=asked.read_tokens,
            sampled=asked.sampled_tokens,
            forward_flops=flops.scored(model.model, asked.read_tokens, tokens),
            decode_flops=round(asked.requests * flops.decode(model.model, tokens, new)),
            source="measured" if stored else "declared",
            width=WIDTH[model.dtype if part.engine == "transformers" else "bfloat16"],
            decoding=Decoding(model.model, asked.requests, at_once, tokens, new) if new else None,
        )

    def _expected(self, node: Node) -> Asked:
        expected, last = cast(HarnessPart, node.part).suite.expected, self._asked(node)
        if expected is None:
            raise NotCounted("requests (expected of the suite)")
        number = expected.requests
        if expected.tokens is not None:
            return Asked(number, number * expected.tokens, number * expected.new_tokens)
        if last is None:
            raise NotCounted("tokens of requests (expected.tokens of the suite)")
        scale = number / last.requests
        return Asked(number, last.read_tokens * scale, last.sampled_tokens * scale)

    def _asked(self, node: Node, *, same: bool = False) -> Asked | None:
        """What a stored suite asked."""
        manifest = self.manifest(node, same=same)
        asked = manifest.facts.get("asked") if manifest is not None else None
        return Asked(**asked) if isinstance(asked, dict) and asked.get("requests") else None

    def _probe(self, node: Node) -> Work:
        """A pass for the loss, and two of three times as many operations for every vector."""
        part = cast(ProbePart, node.part)
        work, vectors = (
            self._scored(node, part.model, part.sequence_length, part.samples),
            part.sharpness.probes,
        )
        return work._replace(
            read=work.read * (1 + 2 * vectors), forward_flops=work.forward_flops * (1 + 6 * vectors)
        )
