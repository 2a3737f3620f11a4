"""The `evaluate_tokenizers` stage: compares tokenizers by their counts on parallel text.

Artifact: `evaluation.json` (`apertus_model.evaluation.tokenization.Comparison`), with all measures and
differences of every language. Metrics: `lines`, `languages`, and those that `EvaluateTokenizersPart.metrics`
lists, against which a plan checks gates.
"""

import numpy as np

from apertus_model.data.rows import Rows
from apertus_model.evaluation.token_counts import read_counts, words
from apertus_model.evaluation.tokenization import Counted, Text, compare
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt
from infra.store.inputs import SourceError
from specs.errors import did_you_mean
from specs.stages.evaluate_tokenizers import COUNTS, OF_VOCABULARY, EvaluateTokenizersPart
from specs.tokenizer_comparison import Comparison

TOLD = ("tokens_per_line", "tokens_per_byte", "parity", "gini")


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Compares the tokenizers. SourceError when the text lacks the language of `parity_to`."""
    part = EvaluateTokenizersPart.model_validate(attempt.job.spec)
    progress.update(0, 1, "comparisons")
    text = _text(attempt.input_artifact("text"), part)
    roles = [role for role in attempt.job.inputs if role.startswith(COUNTS)]
    counted = {role.removeprefix(COUNTS): _counted(attempt.input_artifact(role)) for role in roles}
    comparison = compare(text, counted, part.against)
    _tell(comparison, progress)
    attempt.write_json("evaluation.json", comparison.model_dump())
    progress.update(1, 1, "comparisons")
    attempt.commit(
        metrics={"lines": comparison.lines, "languages": len(comparison.languages)} | comparison.metrics()
    )


def _text(artifact: Artifact, part: EvaluateTokenizersPart) -> Text:
    facts = artifact.manifest.facts
    languages, with_words = facts["languages"], facts["with_words"]
    if part.parity_to not in languages:
        raise SourceError(
            f"parity_to: the text has no language '{part.parity_to}'. Fix:"
            f" {did_you_mean(part.parity_to, languages)}"
        )
    lines = [row["texts"] for row in Rows(artifact)]
    return Text(
        bytes={
            language: np.asarray([len(line[language].encode()) for line in lines]) for language in languages
        },
        words={language: np.asarray([words(line[language]) for line in lines]) for language in with_words},
        parity_to=part.parity_to,
        seed=part.seed,
    )


def _counted(artifact: Artifact) -> Counted:
    metrics = artifact.manifest.metrics
    return Counted(
        read_counts(artifact.local("counts.parquet")),
        {name: metrics[name] for name in ("vocabulary", *OF_VOCABULARY)},
    )


def _tell(comparison: Comparison, progress: Progress) -> None:
    """Logs the lines, the languages, and the main measures of each tokenizer."""
    languages = comparison.languages
    progress.log(f"{comparison.lines:,} lines in {len(languages)} languages: {', '.join(languages)}")
    for name, result in comparison.tokenizers.items():
        shown = [f"{measure} {result.measures[measure].value:.4g}" for measure in TOLD]
        progress.log(
            f"{name}: {', '.join(shown)}, vocabulary_used {result.vocabulary['vocabulary_used']:.4g}"
        )
