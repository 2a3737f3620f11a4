"""The `continuations` part: what a model writes after prefixes of sequences that training may have seen.

Artifact: `continuations-00000.jsonl`, ..., a line for each prefix: `{"probe", "prefix", "offset", "tokens"}`,
the index of the probe of the corpus, the number of given tokens, the number of probe tokens before them, and
the tokens that the model wrote. Probes that are too short to compare all written tokens are left out.

Invariant: as for `completions`, the random numbers of a batch follow from the seed, the prefix, the offset
and the index of its first probe, and units are whole batches.
"""

from functools import cached_property

from apertus_model.data.corpora.planted import read_probes
from apertus_model.data.rows import Row, read_units, write_rows, write_unit
from apertus_model.generation import Generator, local_folder, open_folder
from apertus_model.progress import Progress
from apertus_model.prompt_format import Completion, TokenFormat
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import prepare_process
from apertus_model.work import Result, run_units
from apertus_model.work.units import Span, units_of
from infra.store import Attempt
from specs.stages.memorisation import ContinuationsPart

MOST_PROBES = 2**32  # in a corpus


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. VllmError when the spec names vLLM and it is not installed."""
    part = ContinuationsPart.model_validate(attempt.job.spec)
    units = run_units(Units(attempt), attempt, stop, progress, processes=part.WORKERS)
    written = write_rows(attempt, "continuations", read_units(units))
    progress.log(f"{written['rows']} continuations of {part.sampling.max_new_tokens} tokens")
    attempt.commit(metrics={"sequences": written["rows"]}, facts=written)


class Units:
    """Whole batches of prefixes of one length, continued by one opened model."""

    def __init__(self, attempt: Attempt) -> None:
        part = ContinuationsPart.model_validate(attempt.job.spec)
        self._attempt, self._sampling = attempt, part.sampling
        probes = read_probes(attempt.input_artifact("probes"), part.planted)
        self._probes: list[list[int]] = [probe.token_ids for probe in probes]
        self.units: dict[str, tuple[int, int, Span]] = {}
        for prefix in part.prefixes:
            for offset in part.offsets:
                size = part.batches_per_unit * part.sampling.batch_size
                spans = units_of(f"prefix-{prefix}-offset-{offset}", len(self._long(prefix, offset)), size)
                self.units |= {key: (prefix, offset, span) for key, span in spans.items()}

    def _long(self, prefix: int, offset: int) -> list[int]:
        """The indices of the probes that are long enough to compare all written tokens."""
        end = offset + prefix + self._sampling.max_new_tokens
        return [number for number, probe in enumerate(self._probes) if len(probe) >= end]

    def run(self, key: str) -> Result:
        prefix, offset, (start, stop) = self.units[key]
        numbers, size = self._long(prefix, offset)[start:stop], self._sampling.batch_size
        setting = (prefix * MOST_PROBES + offset) * MOST_PROBES
        rows: list[Row] = []
        for begin in range(0, len(numbers), size):
            own = numbers[begin : begin + size]
            prompts = [{"tokens": self._probes[number][offset : offset + prefix]} for number in own]
            answers = self._generator.complete(prompts, first=setting + start + begin)
            rows += [
                {"probe": number, "prefix": prefix, "offset": offset, "tokens": answer[0]["tokens"]}
                for number, answer in zip(own, answers, strict=True)
            ]
        return write_unit((start, stop), rows, self._attempt.workdir / f"{key}.jsonl")

    @cached_property
    def _generator(self) -> Generator:
        prepare_process(self._attempt.job.launch.cpu_threads)
        folder = local_folder(self._attempt.input_artifact("model"), self._attempt.workdir / "model")
        return open_folder(folder, self._sampling, Endless(), self._attempt.job.launch)


class Endless(TokenFormat):
    """A format that gives the ids of a prefix unchanged, and in which no token ends the continuation."""

    end_ids, pad_id = (), 0

    def tokens(self, prompt: Row) -> list[int]:
        return prompt["tokens"]

    def completion(self, tokens: list[int]) -> Completion:
        return {"tokens": tokens}
