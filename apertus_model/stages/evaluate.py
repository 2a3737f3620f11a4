"""The `evaluate` stage: metrics of a checkpoint on the training engine, and their changes since another one.

Artifact: `metrics.json`, the numbers of the manifest except the measured time; `samples.json`, answers for
people to read; `rewards.json`, rewards by prompt. The metrics are listed in `apertus_model.evaluation`, in a
module per family. This stage adds

    answers/seconds                         the time in which workers sample one answer to every prompt
    memorisation/passes                     passes of training over the corpus with the probes; training saw
                                            the probes of bucket n in it n x passes times
    <suite>/<task>/<metric>                 results of lm-evaluation-harness

Invariants: the metrics have the names that `EvaluatePart.metrics` lists, against which a plan checks gates.
Gates do not affect the metrics; the planner compares stored metrics with the gates of the spec.
"""

import os
from functools import cached_property
from typing import Literal

from apertus_model.data.corpora.planted import encoder, read_planted, read_probes
from apertus_model.data.rows import Rows
from apertus_model.evaluation.answers import Answers, divergence, rewards
from apertus_model.evaluation.exposure import ExposureTexts
from apertus_model.evaluation.memorisation import memorisation
from apertus_model.evaluation.perplexity import forgetting, loss_by_position, perplexity
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.inference import load_evaluator
from apertus_model.trainer.process import engine_process
from infra.store import Artifact, Attempt
from specs.model import ModelSpec
from specs.stages.evaluate import CONTINUATIONS, SUITE, EvaluatePart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Measures, and stores the metrics."""
    part = EvaluatePart.model_validate(attempt.job.spec)
    with engine_process(threads=attempt.job.launch.cpu_threads):
        measure = Measurement(attempt, part)
        rank = int(os.environ["RANK"])  # a model of another architecture has no process group
        if rank != 0:
            progress = Progress(None)
        metrics = measure.all(progress)
        if rank == 0:
            for name, value in metrics.items():
                progress.log(f"{name}: {value:.4g}")
            attempt.write_json("metrics.json", metrics)
            for name, document in measure.documents.items():
                attempt.write_json(name, document)
            attempt.commit(metrics=metrics | measure.times())


class Measurement:
    """One evaluation: the model, its inputs, and the files for people (`documents`, by name)."""

    def __init__(self, attempt: Attempt, part: EvaluatePart) -> None:
        self.attempt = attempt
        self.part = part
        self.documents: dict[str, object] = {}
        self.answers = self._answers("")
        self.exposed = self._exposure_texts()

    @cached_property
    def evaluator(self) -> Evaluator:
        """The model on the training engine, which supports no architecture other than Apertus."""
        assert self.part.model is not None, "the plan asks another architecture for answers only"
        return self._load("checkpoint", self.part.model)

    def all(self, progress: Progress) -> dict[str, float]:
        """Every metric of the part."""
        part, metrics = self.part, dict[str, float]()
        sources = {name: self._artifact(f"source:{index}") for index, name in enumerate(part.source_names)}
        if sources:
            metrics |= perplexity(
                self.evaluator,
                sources,
                sequence_length=part.sequence_length,
                samples=part.samples,
                progress=progress,
            )
        if part.by_position:
            metrics |= loss_by_position(self.evaluator, list(sources.values()), part.by_position)
        if part.memorisation:
            probes = read_probes(self._artifact("probes"), part.memorisation.planted)
            decodings = part.memorisation.decodings
            written = {name: Rows(self._artifact(f"{CONTINUATIONS}{name}")) for name in decodings}
            metrics |= memorisation(probes, written, part.memorisation)
            passes = self.attempt.input_checkpoint("checkpoint").facts["passes"]
            corpus = self.attempt.job.inputs["probes"].fingerprint
            metrics["memorisation/passes"] = float(passes.get(corpus, 0.0))
        if self.exposed is not None:
            metrics |= self.exposed.measure(self.evaluator, progress)
        if self.answers is not None:
            metrics |= self._compared(self.answers, progress)
        if "against" in self.attempt.job.inputs:
            metrics |= forgetting(metrics, self._artifact("against").manifest.metrics)
        for role in self.attempt.job.inputs:
            if role.startswith(SUITE):
                of_suite = self._artifact(role).manifest.metrics
                metrics |= {f"{role.removeprefix(SUITE)}/{name}": value for name, value in of_suite.items()}
        return metrics

    def _compared(self, own: Answers, progress: Progress) -> dict[str, float]:
        """The rewards of the answers, their difference from the other model's, and the divergence from it."""
        part, inputs = self.part, self.attempt.job.inputs
        other = self._answers("against_")
        metrics, table = rewards(own, other, part.name, part.against_name, answers=part.answers)
        self.documents |= {
            "samples.json": own.shown(part.shown, part.name, other, part.against_name),
            "rewards.json": table,
        }
        if "against_checkpoint" in inputs:
            assert part.against_model is not None, "the planner states the other model"
            reference = self._load("against_checkpoint", part.against_model)
            metrics |= divergence(
                self.evaluator, reference, own, sequence_length=self._longest(), progress=progress
            )
        return metrics

    def times(self) -> dict[str, float]:
        """What differs between two runs."""
        own = self.answers
        return {} if own is None else {"answers/seconds": own.seconds / max(1, self.part.answers)}

    def _longest(self) -> int:
        """The number of tokens of the longest sequence that the model reads."""
        by_position = self.part.by_position.sequence_length if self.part.by_position else 0
        exposed = self.exposed.length if self.exposed else 0
        answers = self.answers.longest if self.answers else 0
        return max(self.part.sequence_length, by_position, exposed, answers)

    def _load(self, role: str, model: ModelSpec) -> Evaluator:
        with self.attempt.store.timed():
            return load_evaluator(
                model,
                self.attempt.input_checkpoint(role),
                sequence_length=self._longest(),
                attention=self.part.attention,
                parallel=self.attempt.job.launch.degrees,
                batch_size=self.part.batch_size,
                scratch=self.attempt.job.scratch,
            )

    def _artifact(self, role: str) -> Artifact:
        return self.attempt.input_artifact(role)

    def _answers(self, whose: Literal["", "against_"]) -> Answers | None:
        """The answers of the model, or of the one that it is compared with; None without such inputs."""
        if f"{whose}completions" not in self.attempt.job.inputs:
            return None
        judge = f"{whose}rewards"
        judged = self._artifact(judge) if judge in self.attempt.job.inputs else None
        return Answers.read(self._artifact("prompts"), self._artifact(f"{whose}completions"), judged)

    def _exposure_texts(self) -> ExposureTexts | None:
        """The canaries whose exposure is measured."""
        spec, canaries = self.part.memorisation, self.part.canaries
        if spec is None or spec.exposure is None:
            return None
        assert canaries is not None and spec.planted is not None, "the planner states them"
        tokenizer = self._artifact("tokenizer")
        facts, degrees = tokenizer.manifest.facts, self.attempt.job.launch.degrees
        return ExposureTexts(
            canaries,
            read_planted(self._artifact("probes"), spec.planted),
            spec.exposure,
            encoder(tokenizer.local("tokenizer.json"), facts["bos_id"]),
            facts["eos_id"],
            2 * degrees.cp * degrees.tp,
        )
