"""The `completions` part: answers to prompts, sampled from an exported or any other model, or by a server.

Artifact: `completions-00000.jsonl`, ..., a line per prompt, in the order of the prompts: `{"id",
"completions": [{"text", "tokens", "finished"}]}`, and `"persona"` if the model was given one. `tokens` end
with the end-of-turn token if the model ended its turn (`finished`), else after `max_new_tokens`; `text` has
no special tokens. `tokens` are ids of the prompts' tokenizer, even if the model has another tokenizer
(`apertus_model.prompt_format`). The fact `model` names the model.

Invariant, for transformers: the random numbers of a batch follow from the seed and the index of its first
prompt, and units are whole batches: neither the division into units nor a restart changes a completion.
Stored answers of vLLM and servers are never generated again. The persona of a prompt depends on the seed, the
personas and the prompt's id alone.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from apertus_model.chat.messages import Message
from apertus_model.data.documents.readers import texts_of
from apertus_model.data.rows import Row, Rows, read_units, write_rows, write_unit
from apertus_model.generation import Generator, open_generator, prompts_at_once
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import prepare_process
from apertus_model.work import Result, run_units
from apertus_model.work.units import units_of
from infra.store import Attempt
from specs.errors import StageError
from specs.stages.preference_data import CompletionsPart, Personas


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. VllmError when the spec names vLLM and it is not installed."""
    part = CompletionsPart.model_validate(attempt.job.spec)
    units = run_units(Units(attempt), attempt, stop, progress, processes=part.WORKERS)
    counts: Counter[str] = Counter()
    written = write_rows(attempt, "completions", _counted(read_units(units), counts))
    mean_tokens = counts["tokens"] / counts["completions"]
    finished = counts["finished"] / counts["completions"]
    summary = f"{counts['completions']} completions of {mean_tokens:.1f} tokens on average"
    progress.log(f"{summary}, {finished:.1%} ended by the model")
    seconds = sum(unit.data["seconds"] for unit in units)
    metrics = {
        **counts,
        "mean_tokens": mean_tokens,
        "finished_share": finished,
        "tokens_per_second": counts["tokens"] / seconds,
    }
    attempt.commit(metrics=metrics, facts=written | {"model": model_name(attempt, part)})


def model_name(attempt: Attempt, part: CompletionsPart) -> str:
    """The name of the model that answers: a Hugging Face model as recipes name it, an exported checkpoint by
    stage and step, a server's model by its name on the server."""
    if "model" not in attempt.job.inputs:
        assert part.sampling.server is not None, "checked with the spec"
        return part.sampling.server.model
    artifact = attempt.input_artifact("model")
    if reference := artifact.manifest.execution.spec.get("reference"):
        return f"hf:{reference}"
    checkpoint = artifact.manifest.inputs.get("checkpoint")
    return artifact.path if checkpoint is None else f"{checkpoint.name}@step={checkpoint.step}"


class Units:
    """Whole batches of prompts, completed by one opened model."""

    def __init__(self, attempt: Attempt) -> None:
        part = CompletionsPart.model_validate(attempt.job.spec)
        self._attempt, self._sampling = attempt, part.sampling
        self._personas = DrawnPersonas(part.personas) if part.personas is not None else None
        self._prompts = Rows(attempt.input_artifact("prompts"))
        self._at_once = prompts_at_once(part.sampling, part.prompts_per_unit)
        per_unit = max(1, part.prompts_per_unit // self._at_once) * self._at_once
        self.units = units_of("completions", len(self._prompts), per_unit)

    def run(self, key: str) -> Result:
        (start, stop), size, seconds = self.units[key], self._at_once, 0.0
        rows: list[Row] = []
        for first in range(start, stop, size):
            batch, generator = self._prompts[first : min(first + size, stop)], self._generator
            personas = self._personas
            asked = batch if personas is None else [personas.asked(row) for row in batch]
            began = time.monotonic()
            answers = generator.complete(asked, first=first)
            seconds += time.monotonic() - began
            for row, completions in zip(batch, answers, strict=True):
                given = {} if personas is None else {"persona": personas.of(row)}
                rows.append({"id": row["id"], "completions": completions, **given})
        written = write_unit((start, stop), rows, self._attempt.workdir / f"{key}.jsonl")
        return written._replace(data={"seconds": seconds})  # without loading the model

    @cached_property
    def _generator(self) -> Generator:
        prepare_process(self._attempt.job.launch.cpu_threads)
        facts = self._prompts.artifact.manifest.facts
        ids = {"end_of_turn_id": facts["end_of_turn_id"], "pad_id": facts["pad_id"]}
        return open_generator(self._attempt, self._sampling, self._attempt.job.launch, **ids)


def _counted(rows: Iterator[Row], counts: Counter[str]) -> Iterator[Row]:
    """Yields the rows unchanged, and fills `counts`."""
    for row in rows:
        counts["prompts"] += 1
        for completion in row["completions"]:
            counts["completions"] += 1
            counts["tokens"] += len(completion["tokens"])
            counts["finished"] += completion["finished"]
        yield row


class DrawnPersonas:
    """The personas of a spec, read once. StageError when there are none."""

    def __init__(self, spec: Personas) -> None:
        self._spec = spec
        self._texts = [text.strip() for text in texts_of(spec) if text.strip()]
        if not self._texts:
            raise StageError(
                f"there is no persona in {spec.url}. Fix: correct the url or text_column of personas"
            )

    def of(self, prompt: Row) -> str:
        key = json.dumps([self._spec.seed, prompt["id"]]).encode()
        digest = hashlib.blake2b(key, digest_size=8, person=b"apertus-persona").digest()
        return self._texts[int.from_bytes(digest, "little") % len(self._texts)]

    def asked(self, prompt: Row) -> Row:
        """The prompt with its persona, as a row of `prompts` without tokens and text."""
        system = self._spec.template.replace("{persona}", self.of(prompt))
        kept = {name: value for name, value in prompt.items() if name not in ("tokens", "text")}
        return kept | {"messages": with_system(prompt["messages"], system)}


def with_system(messages: list[Message], text: str) -> list[Message]:
    """Messages in normal form, with a text at the beginning of the system message."""
    own = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    system = {"role": "system", "content": text if not own else f"{text}\n\n{own}"}
    return [system, *messages[own is not None :]]
