"""The `evaluate` stage: perplexity on held-out text, verbatim continuation of repeated sequences, and gates, on the training engine.

Artifact: `metrics.json`, the same numbers as in the manifest:

    perplexity/<source>, perplexity         exp of the mean loss per token: of a source, and over the tokens of all
    memorisation/exact/<n>                  share of the sequences seen n times that are continued word for word
    memorisation/rouge_l/<n>                mean Rouge-L (F1 of the longest common subsequence) of continuation and truth
    memorisation/common_substring/<n>       mean longest common contiguous run, as a share of the suffix
    memorisation/passes                     passes of training over the corpus that repeats them: n x passes is how often one was seen

Invariant: nothing about the gates enters the metrics; whoever plans compares the stored metrics with the gates of the spec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from apertus_model.data.corpora import split_files
from apertus_model.data.samples import validation_samples
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.heldout import Evaluator
from apertus_model.trainer.inference import load_evaluator
from apertus_model.trainer.process import engine_process
from infra.store import Artifact, Attempt
from specs.job import Job
from specs.launch import Launch, Parallel
from specs.stages.evaluate import EvaluatePart


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Measures, and stores what was measured."""
    part = EvaluatePart.model_validate(job.spec)
    launch = Launch.model_validate(job.launch)
    checkpoint = job.inputs["checkpoint"]
    assert checkpoint.checkpoint is not None, "the launcher gives the folder"
    with engine_process(threads=launch.threads or 2):
        with attempt.store.timed():
            evaluator = load_evaluator(
                part.model,
                attempt.store.location(checkpoint.checkpoint),
                sequence_length=max(part.sequence_length, part.prefix + part.suffix),
                attention=part.attention,
                parallel=launch.parallel or Parallel(),
                batch_size=part.batch_size,
                scratch=job.scratch,
            )
        if torch.distributed.get_rank() != 0:
            progress = Progress(None)
        metrics = held_out_perplexity(evaluator, attempt, job, part, progress)
        if part.suffix:
            corpus = Artifact(attempt.store, job.inputs["probes"].path or "")
            probes = corpus.json("probes.json")["probes"]
            metrics |= memorisation(evaluator, probes, prefix=part.prefix, suffix=part.suffix, progress=progress)
            metrics["memorisation/passes"] = passes_over_probes(job, attempt)
        if torch.distributed.get_rank() == 0:
            for name, value in metrics.items():
                progress.log(f"{name}: {value:.4g}")
            attempt.write_json("metrics.json", metrics)
            attempt.commit(metrics=metrics)


def held_out_perplexity(evaluator: Evaluator, attempt: Attempt, job: Job, part: EvaluatePart, progress: Progress) -> dict[str, float]:
    """Perplexity of each source, and over all their tokens."""
    metrics: dict[str, float] = {}
    nats, tokens = 0.0, 0
    for index, name in enumerate(part.source_names):
        corpus = Artifact(attempt.store, job.inputs[f"source:{index}"].path or "")
        recipe = {"sources": [None], **{key: corpus.manifest["facts"][key] for key in ("vocab_size", "eos_id")}}
        heldout = validation_samples(recipe, [split_files(corpus, "validation")], sequence_length=part.sequence_length)
        loss = evaluator.loss([heldout[i] for i in range(min(part.samples, len(heldout)))])
        metrics[f"perplexity/{name}"] = math.exp(loss.nats)
        nats += loss.nats * loss.tokens
        tokens += loss.tokens
        progress.update(index + 1, len(part.source_names), "sources")
    return metrics | {"perplexity": math.exp(nats / tokens)}


def memorisation(
    evaluator: Evaluator, probes: Sequence[dict[str, Any]], *, prefix: int, suffix: int, progress: Progress
) -> dict[str, float]:
    """How well greedy decoding continues each probe after its first `prefix` tokens, by number of repetitions in training.

    Args:
        evaluator: the model.
        probes: `{"bucket": repetitions, "token_ids": [...]}` each; those shorter than prefix + suffix are left out.
        prefix: tokens given.
        suffix: tokens compared.
        progress: told after each batch.
    """
    long_enough = [probe for probe in probes if len(probe["token_ids"]) >= prefix + suffix]
    scores: dict[int, list[tuple[float, float, float]]] = {}
    for begin in range(0, len(long_enough), evaluator.batch_size):
        batch = long_enough[begin : begin + evaluator.batch_size]
        tokens = torch.tensor([probe["token_ids"][: prefix + suffix] for probe in batch], dtype=torch.int64)
        continued = evaluator.continue_greedily(tokens[:, :prefix], suffix)
        for probe, truth, answer in zip(batch, tokens[:, prefix:].tolist(), continued.tolist(), strict=True):
            scores.setdefault(probe["bucket"], []).append(compare(truth, answer))
        progress.update(begin + len(batch), len(long_enough), "sequences")
    names = ("exact", "rouge_l", "common_substring")
    return {
        f"memorisation/{name}/{bucket}": sum(values) / len(values)
        for bucket, rows in sorted(scores.items())
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }


def passes_over_probes(job: Job, attempt: Attempt) -> float:
    """How often training went through the corpus with the probes, up to the checkpoint."""
    checkpoint = job.inputs["checkpoint"]
    assert checkpoint.path is not None and checkpoint.step is not None, "the launcher gives folder and step"
    passes = Artifact(attempt.store, checkpoint.path).checkpoint(checkpoint.step).facts["passes"]
    return float(passes.get(job.inputs["probes"].fingerprint, 0.0))


def compare(truth: Sequence[int], answer: Sequence[int]) -> tuple[float, float, float]:
    """(1 if equal, Rouge-L F1, longest common contiguous run as a share of the truth) of two sequences of tokens.

    Example: truth 1 2 3 4, answer 1 2 9 4 -> (0, 0.75, 0.5).
    """
    subsequence = [0] * (len(answer) + 1)
    run = [0] * (len(answer) + 1)
    longest_run = 0
    for token in truth:
        diagonal_subsequence = diagonal_run = 0
        for column, other in enumerate(answer, start=1):
            above_subsequence, above_run = subsequence[column], run[column]
            if token == other:
                subsequence[column] = diagonal_subsequence + 1
                run[column] = diagonal_run + 1
                longest_run = max(longest_run, run[column])
            else:
                subsequence[column] = max(above_subsequence, subsequence[column - 1])
                run[column] = 0
            diagonal_subsequence, diagonal_run = above_subsequence, above_run
    rouge_l = 2 * subsequence[-1] / (len(truth) + len(answer))
    return float(list(truth) == list(answer)), rouge_l, longest_run / len(truth)
