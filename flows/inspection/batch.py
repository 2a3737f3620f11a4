"""Shows what the model sees: decoded samples of a training step, with documents, sources and trained tokens.

A token is *trained* when the model is asked to predict it: the label of the place before it is not ignored.
The first token of a document never is. In text, the others were left out by the Goldfish loss; in
conversations, they are not the assistant's.
"""

from itertools import groupby
from typing import Any, Literal, NotRequired, TypedDict

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from flows.inspection.common import Options, references
from flows.planning.graph import Node
from flows.planning.plan import Plan
from flows.stored_part import finished
from specs.errors import SpecError
from specs.stages.training import Segment

MARKS = {"untrained": ("⟦", "⟧"), "first": ("‹", "›")}  # around tokens that are printed without colours
STYLES = {"trained": "", "untrained": "dim red strike", "first": "bold cyan", "padding": "dim"}


Status = Literal["trained", "untrained", "first", "padding"]
Array = Literal["counts", "segments", "rewards", "reference"]


class Piece(TypedDict):
    """Neighbouring tokens of one status."""

    status: Status
    tokens: int
    text: str


class ShownDocument(TypedDict):
    """A document, a conversation or a completion of a sample."""

    begin: int  # index of its first token in the sample
    tokens: int
    trained: int  # tokens
    source: str  # with the place in it; or "padding"
    pieces: list[Piece]


class ShownSample(TypedDict):
    """A sample as the model sees it. Lists have a number for each token, unless a comment says otherwise."""

    index: int
    input: list[int]
    labels: list[int]
    positions: list[int]
    weights: NotRequired[list[Any]]  # of labels
    counts: NotRequired[list[Any]]
    segments: NotRequired[list[Any]]
    rewards: NotRequired[list[Any]]  # of completions
    reference: NotRequired[list[Any]]  # log-probabilities of completions
    documents: list[ShownDocument]
    last_label: NotRequired[str]  # decoded; not a token of the sample
    source: str


class ShownBatch(TypedDict):
    """The output of `apertus inspect` for a step of training."""

    name: str
    kind: str
    note: str
    step: int | None  # None when one sample is shown by its index
    global_batch_size: int
    sequence_length: int
    packing: str
    samples: list[ShownSample]


def segment_at(name: str, nodes: list[Node], options: Options) -> Node:
    """The segment of the step in `options`, else the first. SpecError for several phases, or no such step."""
    phases = sorted({node.phase for node in nodes})
    if len(phases) > 1:
        fix = f"name one: {', '.join(phases)}."
        raise SpecError.of((), f"'{name}' has {len(phases)} phases", fix, "inspect")
    step = options.step if options.step is not None else nodes[0].start_step + 1
    for node in nodes:
        if node.start_step < step <= (node.end_step or 0):
            return node
    first, last = nodes[0].start_step + 1, nodes[-1].end_step
    raise SpecError.of((), f"'{name}' has no step {step}", f"name one from {first} to {last}.", "--step")


def collect(plan: Plan, node: Node, options: Options) -> ShownBatch:
    """The first samples of a step of training, decoded."""
    from apertus_model.stages.training_data import open_data
    from apertus_model.tokenizer_files import open_tokenizer

    segment = node.part
    assert isinstance(segment, Segment)
    unvalidated = {"validation": segment.validation.model_copy(update={"interval": 0})}
    data: Any = open_data(plan.store, references(plan, node), segment.model_copy(update=unvalidated))
    tokenizer_artifact = finished(plan, plan.graph.nodes[node.inputs["tokenizer"].name])
    tokenizer = open_tokenizer(tokenizer_artifact.local("tokenizer.json"))
    step = options.step if options.step is not None else node.start_step + 1
    begin, count = segment.sample_at(step - 1), segment.global_batch_size
    if options.sample is not None:
        begin, count = options.sample, 1
    pad = {tokenizer_artifact.manifest.facts.get("pad_id"), tokenizer_artifact.manifest.facts.get("eos_id")}
    samples = [
        sample_of(data, tokenizer, index, pad) for index in range(begin, begin + min(count, options.limit))
    ]
    first, end = segment.sample_at(segment.start_step), segment.sample_at(segment.end_step)
    other = f"training draws the samples {first:,} to {end - 1:,} here; {begin:,} is not among them"
    return {
        "name": node.name,
        "kind": node.kind,
        "note": "" if first <= begin < end else other,
        "step": step if options.sample is None else None,
        "global_batch_size": segment.global_batch_size,
        "sequence_length": segment.sequence_length,
        "packing": segment.packing,
        "samples": samples,
    }


def sample_of(data: Any, tokenizer: Any, index: int, pad: set[int | None]) -> ShownSample:
    """One sample of some `TrainingData`, decoded. `pad`: the ids that pad sequences."""
    sample = data.samples[index]
    ids, labels, positions = (array.tolist() for array in (sample.input, sample.labels, sample.positions))
    weights = getattr(sample, "weights", None)
    labelled = labels
    if weights is not None:  # a label without weight is not trained
        weighs = weights.reshape(len(ids), -1).any(1).tolist()
        labelled = [label if weight else -1 for label, weight in zip(labels, weighs, strict=True)]
    origins = _origins(data, sample, index)
    starts = [place for place, position in enumerate(positions) if position == 0]
    documents: list[ShownDocument] = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
        inside = range(start, end)
        trained = [place for place in inside if labelled[place] >= 0]
        padding = not trained and end == len(ids) and {ids[place] for place in inside} <= pad
        kinds = {place: "padding" if padding else _status(place, start, labelled) for place in inside}
        pieces = list[Piece]()
        for status, run in groupby(inside, kinds.__getitem__):  # so that characters are decoded whole
            tokens = [ids[place] for place in run]
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            pieces.append({"status": status, "tokens": len(tokens), "text": text})
        origin = "padding" if padding else (origins[number] if number < len(origins) else origins[-1])
        shown = ShownDocument(
            begin=start, tokens=end - start, trained=len(trained), source=origin, pieces=pieces
        )
        documents.append(shown)
    sources = dict.fromkeys(document["source"] for document in documents if document["source"] != "padding")
    decoded: ShownSample = {
        "index": index,
        "input": ids,
        "labels": labels,
        "positions": positions,
        "documents": documents,
        "source": ", ".join(sources),
    }
    if weights is not None:
        decoded["weights"] = weights.astype(float).round(6).tolist()
    name: Array
    for name in ("counts", "segments", "rewards", "reference"):
        if (array := getattr(sample, name, None)) is not None:
            decoded[name] = array.tolist()
    if labelled[-1] >= 0:
        decoded["last_label"] = tokenizer.decode([labelled[-1]], skip_special_tokens=False)
    return decoded


def _status(place: int, start: int, labels: list[int]) -> Status:
    if place == start:
        return "first"
    return "trained" if labels[place - 1] >= 0 else "untrained"


def _origins(data: Any, sample: Any, index: int) -> list[str]:
    """The origins of the documents of a sample, in order; the last origin holds for all further documents."""
    samples = data.samples
    if hasattr(samples, "order"):
        draw = samples.order[index]
        place = f"sequence {draw.window:,} of {samples.order.windows[draw.source]:,}, pass {draw.epoch + 1}"
        return [f"{data.names[draw.source]} ({place})"]
    if hasattr(samples, "conversations"):
        talks = samples.conversations(index)
        return [f"{data.names[source]} (conversation {number})" for source, number in talks]
    source, row = samples.place(index)
    rows = samples.sets[source]
    if not hasattr(sample, "rewards"):  # labelled pairs
        ids = rows.sequence_ids(row).tolist()
        return [f"{data.names[0]} (pair {id // 2}, {('chosen', 'rejected')[id % 2]})" for id in ids]
    sides = ("chosen", "rejected") if rows.sides == 2 else ("completion",)
    places = [2 // rows.sides * number for number in range(rows.sequence_ids(row).size)]
    rewarded = rows.sides == 1 or sample.rewards.any()  # the pairs of a file have no rewards
    return [
        f"{data.names[source]} ({sides[number % rows.sides]},"
        + (f" quantile reward {sample.rewards[place]:.3f}," if rewarded else "")
        + f" reference log-probability {sample.reference[place]:.2f})"
        for number, place in enumerate(places)
    ]


def show(console: Console, batch: ShownBatch) -> None:
    at = "one sample"
    if batch["step"] is not None:
        at = f"step {batch['step']}, {batch['global_batch_size']} sequences"
    heading = f"[bold]{escape(batch['name'])}[/]: {at} of {batch['sequence_length']} tokens"
    console.print(heading, highlight=False)
    if batch["note"]:
        console.print(f"[yellow]note[/] {escape(batch['note'])}", highlight=False, soft_wrap=True)
    marks = {} if console.is_terminal or console.record else MARKS
    legend = Text("tokens: ")
    for status, style in STYLES.items():
        begin, end = marks.get(status, ("", ""))
        legend.append(f"{begin}{status}{end}", style=style).append("  ")
    console.print(legend)
    for sample in batch["samples"]:
        trained = sum(document["trained"] for document in sample["documents"])
        console.rule(Text(f"sample {sample['index']}: {trained} of {len(sample['input'])} places trained"))
        for document in sample["documents"]:
            last = document["begin"] + document["tokens"] - 1
            heading = (
                f"tokens {document['begin']} to {last}, positions 0 to {document['tokens'] - 1}:"
                f" {document['source']}"
            )
            console.print(Text(heading, style="bold magenta"), soft_wrap=True)
            if document["source"] != "padding":
                text = Text()
                for piece in document["pieces"]:
                    begin, end = marks.get(piece["status"], ("", ""))
                    text.append(f"{begin}{piece['text']}{end}", style=STYLES[piece["status"]])
                console.print(text)
        if "last_label" in sample:
            last_label = f"and then, predicted at the last place: {sample['last_label']!r}"
            console.print(Text(last_label, style="dim"))
