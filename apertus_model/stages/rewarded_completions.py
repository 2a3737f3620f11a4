"""The `rewarded_completions` part: tokenises completions with known rewards, with their quantiles.

Artifact: the arrays of `pairs` (`apertus_model.stages.pairs`), in which each sequence is a single completion;
and `completions.jsonl` for people: `{"id", "prompt", "text", "reward", "quantile"}`, with the prompt's id.

Invariant: every completion is kept, or is counted under the reason for being left out.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from apertus_model.data.conversations.rows import EncodedConversations, is_number, tokenizer_facts
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.preferences.choice import quantiles
from apertus_model.data.preferences.packed_pairs import SequenceWriter
from apertus_model.data.rows import Row, read_units, to_line
from apertus_model.progress import Progress
from apertus_model.stages.pairs import histogram_of
from apertus_model.stages.prompts import prompt_id
from apertus_model.stop import StopSignal
from apertus_model.work import run_units
from infra.store import Attempt
from specs.errors import StageError, counts_in_words
from specs.stages.rewarded_completions import RewardedCompletionsPart

FEWEST = 2  # reference rewards, as for pairs


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. StageError when there is no completion to train on."""
    part = RewardedCompletionsPart.model_validate(attempt.job.spec)
    units = run_units(Units(attempt), attempt, stop, progress, processes=part.WORKERS)
    dropped: Counter[str] = Counter()
    kept: list[float] = []
    people = attempt.workdir / "completions.jsonl"
    with SequenceWriter(attempt.workdir) as writer, open(people, "w", encoding="utf-8") as file:
        for unit_row in read_units(units):
            dropped.update(unit_row["dropped"])
            for row in unit_row["completions"]:
                writer.add(row.pop("prompt_tokens"), row.pop("tokens"))
                kept.append(row["quantile"])
                file.write(to_line(row))
        names = ["completions.jsonl", "rewards.npy", *writer.finish()]
    summary = f"{counts_in_words(dropped)} dropped"
    if not kept:
        raise StageError(
            f"no completion is left: {summary}."
            f" Fix: check the columns '{part.reward}' and '{part.reference_rewards}', of {FEWEST} or more"
            " completions of the model, or raise max_tokens"
        )
    np.save(attempt.workdir / "rewards.npy", np.array(kept, np.float32), allow_pickle=False)
    for name in names:
        attempt.put(attempt.workdir / name, name)
    progress.log(f"{len(kept)} completions; {summary}")
    metrics = {
        "completions": len(kept),
        "tokens": sum(writer.lengths),
        "dropped": dict(dropped),
        "mean_quantile": float(np.mean(kept)),
        "quantile_histogram": histogram_of(kept).tolist(),
    }
    attempt.commit(metrics=metrics, facts=tokenizer_facts(attempt) | {"sequences": len(kept)})


class Units(EncodedConversations):
    """Ranges of conversations, as rows `{"completions", "dropped"}`."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._part = RewardedCompletionsPart.model_validate(attempt.job.spec)
        self._add_units("conversations", "train", self._part.completions_per_unit)

    def _row(self, conversation: Conversation, number: int) -> Row:
        dropped: Counter[str] = Counter()
        kept = list(self._kept(conversation, dropped))
        return {"completions": kept, "dropped": dict(dropped)}

    def _kept(self, conversation: Conversation, dropped: Counter[str]) -> Iterator[Row]:
        """Yields the completions of a conversation that are trained on, and counts the others."""
        part, texts = self._part, conversation.completions
        column = conversation.metadata.get(part.reward)
        rewards: list[Any] = column if isinstance(column, list) else [column]
        reference = conversation.metadata.get(part.reference_rewards)
        if not texts:
            dropped["without_text"] += 1
        elif not rewards or len(rewards) != len(texts) or not all(map(is_number, rewards)):
            dropped["without_reward" if column is None else "bad_reward"] += len(texts)
        elif not isinstance(reference, list) or not all(map(is_number, reference)):
            reason = "without_reference_rewards" if reference is None else "bad_reference_rewards"
            dropped[reason] += len(texts)
        elif len(reference) < FEWEST:
            dropped["few_reference_rewards"] += len(texts)
        else:
            prompt = self._encoder.prompt(conversation.prompt, conversation.tools)
            text = self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
            for answer, reward, quantile in zip(texts, rewards, quantiles(rewards, reference), strict=True):
                tokens = self._encoder.completion(answer)
                if prompt.size + tokens.size > part.max_tokens:
                    dropped["too_long"] += 1
                    continue
                yield {
                    **{"id": prompt_id(prompt), "prompt": text, "text": answer},
                    **{"reward": reward, "quantile": quantile},
                    **{"prompt_tokens": prompt.tolist(), "tokens": tokens.tolist()},
                }
