"""The `labelled_pairs` part: tokenises preferred and rejected completions, for a reward model.

Artifact, with the prefix `train-` or `validation-`:

    tokens.npy          int32: prompt and completion of every sequence, one after the other
    lengths.npy         int64, (sequences,): tokens of each
    prompt_lengths.npy  int64, (sequences,): how many of them are the prompt's
    margins.npy         float32, (pairs,)
    sources.npy         int32, (pairs,): index of the conversations that the pair is from

Sequences 2k and 2k + 1 are the chosen and the rejected sequence of pair k. A completion ends with the
end-of-turn token.

Invariant: every conversation becomes a pair, or is counted under the reason why it does not. A completion is
never cut, since that could remove the difference between the two.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from apertus_model.data.conversations.rows import EncodedConversations, is_number, tokenizer_facts
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.preferences.packed_pairs import SequenceWriter
from apertus_model.data.rows import Row, read_units
from apertus_model.data.tokens.stream import Split
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.work import Result, run_units
from infra.store import Attempt
from specs.errors import StageError, counts_in_words
from specs.stages.reward_model import LabelledPairsPart

SPLITS: tuple[Split, ...] = ("train", "validation")


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. StageError when there is no pair in the training split."""
    part = LabelledPairsPart.model_validate(attempt.job.spec)
    units = run_units(Units(attempt), attempt, stop, progress, processes=part.WORKERS)
    metrics: dict[str, Any] = {}
    for split in SPLITS:
        chosen = [unit for unit in units if unit.data == split]
        counts, names = write_pairs(read_units(chosen), attempt.workdir, split)
        metrics[split] = dict(counts)
        for name in names:
            attempt.put(attempt.workdir / name, name)
    summary = "; ".join(f"{split}: {counts_in_words(counts)}" for split, counts in metrics.items())
    if not metrics["train"].get("pairs"):
        raise StageError(
            f"no pair is left to train on: {summary}."
            f" Fix: set a larger sequence_length than {part.max_tokens}, or use conversations whose rows"
            " have chosen and rejected"
        )
    progress.log(summary)
    attempt.commit(metrics=metrics, facts=tokenizer_facts(attempt))


def write_pairs(rows: Iterable[Row], folder: Path, split: Split) -> tuple[Counter[str], list[str]]:
    """Writes the pairs of a split, and returns its counts and the names of its files."""
    counts: Counter[str] = Counter()
    margins: list[float] = []
    sources: list[int] = []
    with SequenceWriter(folder, f"{split}-") as writer:
        for row in rows:
            if "dropped" in row:
                counts[row["dropped"]] += 1
                continue
            for side in ("chosen", "rejected"):
                writer.add(row["prompt"], row[side])
            counts["pairs"] += 1
            counts["without_margin"] += row["margin"] is None
            margins.append(row["margin"] or 0.0)
            sources.append(row["source"])
        names = writer.finish()
    for name, values in (("margins", np.array(margins, "<f4")), ("sources", np.array(sources, "<i4"))):
        names.append(f"{split}-{name}.npy")
        np.save(folder / names[-1], values, allow_pickle=False)
    return counts, names


class Units(EncodedConversations):
    """Ranges of conversations, as pairs or as `{"dropped": reason}`. The data of a unit are its split."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._part = LabelledPairsPart.model_validate(attempt.job.spec)
        for split in SPLITS:
            self._add_units(split, split, self._part.pairs_per_unit)

    def run(self, key: str) -> Result:
        return super().run(key)._replace(data=self.units[key].split)

    def _row(self, conversation: Conversation, number: int) -> Row:
        part = self._part
        if not conversation.preference:
            return {"dropped": "without_label"}
        if len(set(conversation.completions)) < 2:
            return {"dropped": "equal_completions"}
        margin = conversation.metadata.get(part.margin) if part.margin is not None else None
        if margin is not None and not (is_number(margin) and margin >= 0):
            return {"dropped": "bad_margin"}
        prompt = self._encoder.prompt(conversation.prompt, conversation.tools).tolist()
        chosen, rejected = (self._encoder.completion(text).tolist() for text in conversation.completions)
        if 2 * len(prompt) + len(chosen) + len(rejected) > part.max_tokens:
            return {"dropped": "too_long"}
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": margin, "source": number}
