"""Shows conversations with the tokens that are trained; prompts, their completions and rewards; pairs.

Invariant: reads the part and the parts that belong to it row by row; imports neither torch nor Prefect, and
what needs numpy when it is asked for.
"""

import json
from collections.abc import Callable
from itertools import groupby
from typing import TypedDict

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from flows.inspection.common import Options
from flows.planning.graph import Node
from flows.planning.plan import Plan
from flows.stored_part import finished
from infra.store import Artifact
from specs.errors import SpecError

KINDS = ("conversations", "prompts", "completions", "rewards", "pairs", "labelled_pairs")


class ShownAnswer(TypedDict):
    text: str
    about: str  # who wrote it, and what it is worth


class Item(TypedDict):
    """A conversation, a prompt with its completions, or a pair. `pieces`: (trained, text) in order."""

    index: int
    id: str
    pieces: list[tuple[bool, str]]
    answers: list[ShownAnswer]


class RowsDocument(TypedDict):
    """The output of `apertus inspect` for one of `KINDS`."""

    name: str
    kind: str
    count: int
    items: list[Item]


Reader = tuple[int, Callable[[int], Item]]
"""The number of rows of a part, and a function that reads one."""


def collect(plan: Plan, node: Node, options: Options) -> RowsDocument:
    """The first rows of a part, or that with the index `--sample`."""
    artifact = finished(plan, node)
    count, item = READERS[node.kind](plan, node, artifact)
    if options.sample is not None and options.sample >= count:
        fix = f"name one from 0 to {count - 1}."
        raise SpecError.of((), f"'{node.name}' has no row {options.sample}", fix, "--sample")
    rows = range(min(count, options.limit)) if options.sample is None else [options.sample]
    return {"name": node.name, "kind": node.kind, "count": count, "items": [item(index) for index in rows]}


def show(console: Console, document: RowsDocument) -> None:
    console.print(f"[bold]{escape(document['name'])}[/]: {document['count']:,} rows", highlight=False)
    if any(trained for item in document["items"] for trained, _ in item["pieces"]):
        console.print(Text("trained  ").append("not trained", style="dim"))
    for item in document["items"]:
        console.rule(Text(f"{item['index']}: {item['id']}".removesuffix(": ")))
        marked = any(trained for trained, _ in item["pieces"])
        text = Text()
        for trained, piece in item["pieces"]:
            text.append(piece, style="dim" if marked and not trained else "")
        console.print(text)
        for answer in item["answers"]:
            console.print(Text(answer["about"], style="bold magenta"), soft_wrap=True)
            console.print(Text(answer["text"]))


def _conversations(plan: Plan, node: Node, artifact: Artifact) -> Reader:
    from apertus_model.chat.encoder import TRAINED
    from apertus_model.data.conversations.stored import ConversationShards

    shards, decode = ConversationShards(artifact, "train"), _decoder(plan, node)

    def item(index: int) -> Item:
        tokens, mask = shards.tokens(index).tolist(), shards.mask(index).tolist()
        pieces = []
        for trained, run in groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1] == TRAINED):
            pieces.append((trained, decode([token for token, _ in run])))
        talk = shards.conversation(index)
        about = "rejected" if talk.preference else "another completion"
        others: list[ShownAnswer] = [{"text": text, "about": about} for text in talk.completions[1:]]
        return {"index": index, "id": talk.id, "pieces": pieces, "answers": others}

    return len(shards), item


def _decoder(plan: Plan, node: Node) -> Callable[[list[int]], str]:
    """The function that shows tokens of a part, special tokens included, as text."""
    from apertus_model.tokenizer_files import open_tokenizer

    part = plan.graph.nodes[node.inputs["tokenizer"].node or ""]
    tokenizer = open_tokenizer(finished(plan, part).local("tokenizer.json"))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


def _prompts(plan: Plan, node: Node, artifact: Artifact) -> Reader:
    """Prompts with their completions: those of the part, or all with the rewards of the part."""
    from apertus_model.data.preferences.choice import offline_completions
    from apertus_model.data.rows import Rows

    inputs = {role: plan.graph.nodes[input_.node] for role, input_ in node.inputs.items() if input_.node}
    prompts = Rows(artifact if node.kind == "prompts" else finished(plan, inputs["prompts"]))
    rewards = Rows(artifact) if node.kind == "rewards" else None
    sampled = finished(plan, inputs["completions"]) if rewards else artifact
    answers = None if node.kind == "prompts" else Rows(sampled)
    generators = sum(role.startswith("generated:") for role in inputs)
    others = [Rows(finished(plan, inputs[f"generated:{number}"])) for number in range(generators)]
    models = [rows.artifact.manifest.facts["model"] for rows in others]

    def item(index: int) -> Item:
        prompt = prompts[index]
        written: list[ShownAnswer] = []
        if node.kind != "completions":
            offline = offline_completions(prompt, [rows[index] for rows in others], models)
            for completion, maker in offline:
                written.append({"text": completion["text"], "about": " ".join(["offline", *maker.values()])})
        for completion in answers[index]["completions"] if answers else []:
            end = "" if completion.get("finished", True) else ", cut off"
            written.append({"text": completion["text"], "about": f"sampled{end}"})
        if rewards:
            values = [*rewards[index]["offline"], *rewards[index]["sampled"]]
            for answer, value in zip(written, values, strict=True):
                answer["about"] += f", reward {value:.4g}"
        return {"index": index, "id": prompt["id"], "pieces": [(False, prompt["text"])], "answers": written}

    return len(prompts), item


def _pairs(plan: Plan, node: Node, artifact: Artifact) -> Reader:
    lines = artifact.bytes("pairs.jsonl").splitlines()

    def item(index: int) -> Item:
        row = json.loads(lines[index])
        answers: list[ShownAnswer] = []
        for side in ("chosen", "rejected"):
            completion = row[side]
            worth = f"reward {completion['reward']:.4g}, quantile {completion['quantile']:.3g}"
            who = " ".join(completion[name] for name in ("origin", "model") if name in completion)
            answers.append({"text": completion["text"], "about": f"{side}: {who}, {worth}"})
        return {"index": index, "id": row["id"], "pieces": [(False, row["prompt"])], "answers": answers}

    return len(lines), item


def _labelled_pairs(plan: Plan, node: Node, artifact: Artifact) -> Reader:
    from apertus_model.data.preferences.packed_pairs import pair_arrays

    arrays = pair_arrays(artifact, ("lengths", "prompt_lengths"), "train-", ("margins",))
    ends, decode = arrays["lengths"].cumsum().tolist(), _decoder(plan, node)

    def item(index: int) -> Item:
        answers: list[ShownAnswer] = []
        prompt = ""
        for sequence, side in ((2 * index, "chosen"), (2 * index + 1, "rejected")):
            begin = ends[sequence] - int(arrays["lengths"][sequence])
            middle = begin + int(arrays["prompt_lengths"][sequence])
            prompt = decode(arrays["tokens"][begin:middle].tolist())
            text = decode(arrays["tokens"][middle : ends[sequence]].tolist())
            answers.append({"text": text, "about": side})
        answers[0]["about"] += f", margin {arrays['margins'][index]:.4g}"
        return {"index": index, "id": "", "pieces": [(False, prompt)], "answers": answers}

    return len(ends) // 2, item


READERS = {
    "conversations": _conversations,
    **dict.fromkeys(("prompts", "completions", "rewards"), _prompts),
    "pairs": _pairs,
    "labelled_pairs": _labelled_pairs,
}
