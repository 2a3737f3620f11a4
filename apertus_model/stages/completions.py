"""The `completions` part: answers to prompts, sampled from an exported model, from any other, or by a server.

Artifact: `completions-00000.jsonl`, ..., a line per prompt, in the order of the prompts: `{"id",
"completions": [{"text", "tokens", "finished"}]}`. `tokens` end with the end of the turn if the model ended it
(`finished`), else after `max_new_tokens`; `text` is without special tokens. `tokens` are of the tokenizer of
the prompts, also where the model has another one (`apertus_model.prompt_format`).

Invariant, for transformers: the random numbers of a batch follow from the seed and the index of its first
prompt, and units are whole batches: neither the division into units nor a restart changes a completion. With
vLLM and servers the stored answers are the truth, and are never made again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import cache

from apertus_model.data.rows import Row, Rows, Units, spans, write_rows
from apertus_model.generation import Completion, Generator, open_generator, prompts_at_once
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import engine_process
from infra.store import Attempt
from specs.job import Job
from specs.stages.preference_data import CompletionsPart


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. GenerationError when the engine that the spec names is not installed."""
    part = CompletionsPart.model_validate(job.spec)
    prompts = Rows(attempt.input_artifact("prompts"))
    facts = prompts.artifact.manifest.facts
    size = prompts_at_once(part.sampling, part.prompts_per_unit)

    @cache
    def generator() -> Generator:
        ids = {"end_of_turn_id": facts["end_of_turn_id"], "pad_id": facts["pad_id"]}
        return open_generator(attempt, part.sampling, job.launch, **ids)

    speed = Speed()

    def rows_of(start: int, stop: int) -> Iterator[Row]:
        for first in range(start, stop, size):
            batch = prompts[first : min(first + size, stop)]
            sampler, began = generator(), time.monotonic()
            answers = sampler.complete(batch, first=first)
            speed.add(answers, time.monotonic() - began)
            for row, completions in zip(batch, answers, strict=True):
                yield {"id": row["id"], "completions": completions}

    units = Units(attempt, "completions", spans(len(prompts), max(1, part.prompts_per_unit // size) * size))
    with engine_process(threads=job.launch.threads or 2):
        units.compute(rows_of, progress)
    counts: Counter[str] = Counter()
    written = write_rows(attempt, "completions", _counted(units.rows(), counts))
    mean_tokens = counts["tokens"] / counts["completions"]
    finished = counts["finished"] / counts["completions"]
    story = f"{counts['completions']} completions of {mean_tokens:.1f} tokens on average"
    progress.log(f"{story}, {finished:.1%} ended by the model")
    metrics = {**counts, "mean_tokens": mean_tokens, "finished_share": finished, **speed.metrics()}
    attempt.commit(metrics=metrics, facts=written)


class Speed:
    """Tokens per second of this process, without the time of loading the model."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0, 0.0

    def add(self, answers: list[list[Completion]], seconds: float) -> None:
        """A batch of answers, by prompt."""
        self._tokens += sum(len(completion["tokens"]) for row in answers for completion in row)
        self._seconds += seconds

    def metrics(self) -> dict[str, float]:
        """`tokens_per_second`; nothing where all units were stored before."""
        return {"tokens_per_second": self._tokens / self._seconds} if self._seconds else {}


def _counted(rows: Iterator[Row], counts: Counter[str]) -> Iterator[Row]:
    """The rows unchanged; fills `counts`."""
    for row in rows:
        counts["prompts"] += 1
        for completion in row["completions"]:
            counts["completions"] += 1
            counts["tokens"] += len(completion["tokens"])
            counts["finished"] += completion["finished"]
        yield row
