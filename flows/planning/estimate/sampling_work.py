"""Counts the work of parts that sample, score completions or documents, or store a teacher's predictions."""

from typing import NamedTuple, cast

from flows.planning.estimate import flops
from flows.planning.estimate.corpus_work import BYTES_PER_TOKEN, documents_of, folder_at
from flows.planning.estimate.work import Count, Decoding, Known, ModelWork, NotCounted, Number, weakest
from flows.planning.graph import Node
from infra.store.hugging_face import stored_model
from specs.capabilities import WIDTHS
from specs.stages.base import Part
from specs.stages.classifier import ClassifierPart, Encoder, FeaturesPart, ScoresPart
from specs.stages.conversations import ConversationsPart
from specs.stages.distill import TeacherTokensPart
from specs.stages.evaluate_reward import EvaluateRewardPart
from specs.stages.export import ExportPart
from specs.stages.hugging_face import ModelFolderPart
from specs.stages.preference_data import (
    CompletionsPart,
    LogProbabilitiesPart,
    PairsPart,
    PromptsPart,
    RewardsPart,
)


def _prompts(known: Known, node: Node) -> Number:
    """The number of prompts of a `prompts` part."""
    part = cast(PromptsPart, node.part)
    if (stored := known.metric(node, "prompts", same=True)) is not None:
        return Number(stored, "measured")
    sources = [known.graph.nodes[input_.node or ""] for role, input_ in node.inputs.items() if "conv" in role]
    try:
        counts = [_conversations(known, source, part.split) for source in sources]
    except NotCounted:
        if part.limit is None:
            raise
        return Number(part.limit, "at most")
    whole = sum(count.value for count in counts)
    if part.limit is not None and part.limit < whole:
        return Number(part.limit, "at most")
    return Number(whole, weakest(count.source for count in counts))


def _conversations(known: Known, node: Node, split: str) -> Number:
    part, manifest = cast(ConversationsPart, node.part), known.manifest(node, same=True)
    if manifest is not None and (counts := manifest.metrics.get(split)):
        return Number(counts["conversations"], "at most")
    declared = part.source.declared
    if declared is None or declared.documents is None:
        raise NotCounted(f"conversations of {node.name}")
    process = part.process
    share = process.holdout if split == "validation" else 1 - process.holdout
    kept = min(declared.documents * (process.share or 1), process.count or declared.documents)
    return Number(round(kept * share), "declared")


def _sizes(known: Known, node: Node) -> tuple[Number, Number]:
    """The mean tokens of a prompt and of a completion in a part with completions."""
    sampling = cast(CompletionsPart, node.part).sampling
    prompts = known.input(node, "prompts")
    limits = cast(PromptsPart, prompts.part)
    prompt = Number(limits.max_tokens - limits.max_new_tokens, "at most")
    if sampling.expected_prompt_tokens is not None:
        prompt = Number(sampling.expected_prompt_tokens, "declared")
    tokens, number = known.metric(prompts, "prompt_tokens"), known.metric(prompts, "prompts")
    if tokens is not None and number:
        prompt = Number(tokens / number, "measured")
    completion = Number(sampling.max_new_tokens, "at most")
    if sampling.expected_tokens is not None:
        completion = Number(sampling.expected_tokens, "declared")
    if (mean := known.metric(node, "mean_tokens")) is not None:
        completion = Number(mean, "measured")
    return prompt, completion


def _completions(known: Known, node: Node) -> ModelWork:
    """The work of sampling. vLLM reads a prompt once for all of its completions, transformers once for each;
    transformers computes greedy completions once and copies them."""
    sampling = cast(CompletionsPart, node.part).sampling
    model = known.model(node)
    own = sampling.engine == "transformers"
    prompts, (prompt, completion) = _prompts(known, known.input(node, "prompts")), _sizes(known, node)
    each = 1 if own and sampling.greedy else sampling.n
    sequences, reads = prompts.value * each, prompts.value * (each if own else 1)
    return ModelWork(
        requests=sequences,
        read_tokens=reads * prompt.value,
        sampled_tokens=sequences * completion.value,
        forward_flops=round(reads * flops.prefill(model.model, prompt.value)),
        decode_flops=round(sequences * flops.decode(model.model, prompt.value, completion.value)),
        source=weakest([prompts.source, prompt.source, completion.source]),
        width=WIDTHS[model.dtype] if own else WIDTHS["bfloat16"],
        decoding=Decoding(
            model.model,
            sequences,
            sampling.batch_size * each,
            prompt.value,
            # a batch of transformers ends with its longest completion
            sampling.max_new_tokens if own else completion.value,
        ),
    )


def answers(known: Known, completions: Node) -> tuple[Number, Number]:
    """The number of sequences of a prompt and a sampled completion, and their mean tokens."""
    sampling = cast(CompletionsPart, completions.part).sampling
    prompts, sizes = _prompts(known, known.input(completions, "prompts")), _sizes(known, completions)
    tokens = Number(sum(size.value for size in sizes), weakest(size.source for size in sizes))
    return prompts._replace(value=prompts.value * sampling.n), tokens


def _rewards(known: Known, node: Node) -> ModelWork | None:
    """The work of scoring. A model reads every completion after its prompt: two operations per parameter and
    token. A judge reads the common beginning of its questions once, and two completions for a comparison."""
    reward, prompts = cast(RewardsPart, node.part).reward, known.input(node, "prompts")
    if reward.function is not None:
        return None
    parameters, width = _reward_model(known, node)
    sequences, tokens = answers(known, known.input(node, "completions"))
    count, total, missing = sequences.value, sequences.value * tokens.value, ""
    sources = [sequences.source, tokens.source]
    for role in node.inputs:
        if role.startswith("generated:"):
            others, each = answers(known, known.input(node, role))
            count, total = count + others.value, total + others.value * each.value
            sources += [others.source, each.source]
    if cast(PromptsPart, prompts.part).offline:
        offline = known.metric(prompts, "completions", same=True)
        count, total = count + (offline or 0), total + (offline or 0) * tokens.value
        missing = "" if offline is not None else "offline completions"
    if reward.judge is not None and reward.judge.pairwise is not None:
        best = reward.judge.pairwise.best
        compared = best * (best - 1) * _prompts(known, prompts).value
        count, total = count + compared, total + 2 * compared * tokens.value
    return ModelWork(
        requests=count,
        read_tokens=total,
        forward_flops=round(2 * parameters * total),
        source=weakest(sources),
        width=width,
        missing=missing,
    )


def _labelled_pairs(known: Known, node: Node) -> ModelWork | None:
    if cast(EvaluateRewardPart, node.part).reward.function is not None:
        return None
    raise NotCounted("labelled pairs and their lengths")


def _reward_model(known: Known, node: Node) -> tuple[float, int]:
    """The parameters of the model that scores, and the bytes of each, by the size of its files or as
    declared."""
    reward = cast(RewardsPart, node.part).reward
    if reward.judge is not None and reward.judge.server is not None:
        raise NotCounted("the model of a server")
    if reward.from_ is not None or reward.judge is not None:
        scorer = known.input(node, "judge" if reward.judge is not None else "reward_model").part
        if isinstance(scorer, ExportPart):
            halved = reward.judge is not None and reward.judge.engine == "vllm"
            return scorer.model.parameters, WIDTHS["bfloat16" if halved else scorer.dtype]
        folder = cast(ModelFolderPart, scorer)
        width = stored_model(folder.url).width
        if width is not None and folder.weight_bytes:
            return folder.weight_bytes / width, width
        if reward.parameters is None and folder.shape is not None:
            return folder.shape.parameters, WIDTHS["bfloat16"]
    listing = known.graph.listings.get(f"{node.stage}.reward")
    width = stored_model(listing.url).width if listing is not None else None
    if listing is not None and width is not None:
        held = sum(file.size for file in listing.files if file.path.endswith(".safetensors"))
        return held / width, width
    if reward.parameters is None:
        raise NotCounted("parameters (reward.parameters)")
    return reward.parameters, WIDTHS["bfloat16"]


def _log_probabilities(known: Known, node: Node) -> ModelWork:
    """The work of scoring the packed rows of the pairs, which have two sequences each."""
    part, pairs = cast(LogProbabilitiesPart, node.part), known.input(node, "pairs")
    if not isinstance(pairs.part, PairsPart):
        raise NotCounted("completions of a file, and their lengths")
    completions = known.input(pairs, "completions")
    prompts = _prompts(known, known.input(completions, "prompts"))
    _, tokens = answers(known, completions)
    sequences = Number(2 * pairs.part.pairs * prompts.value, prompts.source)
    if (stored := known.metric(node, "sequences", same=True)) is not None:
        sequences = Number(stored, "measured")
    each = min(tokens.value, pairs.part.max_tokens)
    rows = -(-sequences.value * each // part.sequence_length)
    return ModelWork(
        requests=sequences.value,
        read_tokens=rows * part.sequence_length,
        forward_flops=flops.scored(part.model, rows * part.sequence_length, part.sequence_length),
        source=weakest([sequences.source, tokens.source]),
        width=WIDTHS[part.precision.param],
    )


def _teacher_tokens(known: Known, node: Node) -> ModelWork:
    part = cast(TeacherTokensPart, node.part)
    tokens = part.samples * part.sequence_length
    operations = flops.scored(part.model, tokens, part.sequence_length)
    return ModelWork(part.samples, tokens, 0, operations, width=WIDTHS[part.precision.param])


class Encoding(NamedTuple):
    """The encoder with which a part reads documents, and its settings."""

    url: str  # of the encoder
    max_tokens: int  # of a document
    precision: str | None  # of matrix products; None: as stored


def _encoder(known: Known, node: Node) -> ModelWork | None:
    """The work of embedding or scoring documents with a Hugging Face encoder; None for a part that asks none.

        FLOPs of a token = 2 (parameters - words x width) + 4 layers x length x width

    A document has (bytes of text / `BYTES_PER_TOKEN`) tokens, up to the `max_tokens` that are read; padding
    is not counted. The number of documents comes from the stored part, from the source's declaration, or from
    its files."""
    reading = _reading(known, node)
    if reading is None:
        return None
    folder = folder_at(known.graph, reading.url)
    model = stored_model(folder.url) if folder is not None else None
    sizes = (model.width, model.vocab_size, model.hidden_size, model.num_hidden_layers) if model else (None,)
    if folder is None or None in sizes:
        return ModelWork(missing="the sizes of the encoder (config.json)")
    width, words, hidden, layers = (size or 0 for size in sizes)
    held = sum(file.size for file in folder.files if file.path.endswith(".safetensors")) / width
    documents = documents_of(known.graph, node, BYTES_PER_TOKEN)
    each = documents.bytes / max(1, documents.number) / BYTES_PER_TOKEN
    tokens, manifest = min(each, reading.max_tokens), known.manifest(node)
    number = manifest.metrics.get("documents", documents.number) if manifest is not None else documents.number
    operations = 2 * (held - words * hidden) + 4 * layers * tokens * hidden
    return ModelWork(
        requests=number,
        read_tokens=number * tokens,
        forward_flops=round(number * tokens * operations),
        source="measured" if manifest is not None else documents.source,
        width=WIDTHS.get(reading.precision or "", width),
    )


def _reading(known: Known, node: Node) -> Encoding | None:
    part = node.part
    encoder: Encoder | None = None
    if isinstance(part, FeaturesPart):
        encoder = part.encoder
    elif isinstance(part, ScoresPart) and part.method == "sequence-classifier":
        return Encoding(str(part.url), part.max_tokens, None)
    elif isinstance(part, ScoresPart) and part.method == "mlp":
        classifier = known.graph.nodes[node.inputs["classifier"].node or ""].part
        assert isinstance(classifier, ClassifierPart) and isinstance(classifier.training, Encoder)
        encoder = classifier.training
    return Encoding(encoder.encoder, encoder.max_tokens, encoder.precision) if encoder is not None else None


SAMPLING: dict[type[Part], Count] = {
    CompletionsPart: _completions,
    RewardsPart: _rewards,
    EvaluateRewardPart: _labelled_pairs,
    LogProbabilitiesPart: _log_probabilities,
    TeacherTokensPart: _teacher_tokens,
    FeaturesPart: _encoder,
    ScoresPart: _encoder,
}
