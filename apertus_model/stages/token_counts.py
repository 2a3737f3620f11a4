"""The `token_counts` part: counts the tokens of parallel text with one tokenizer.

Artifact: `counts.parquet` (`apertus_model.evaluation.token_counts`). Metrics: `tokens`, `vocabulary`, and the
measures of the vocabulary.
"""

from apertus_model.data.rows import Rows
from apertus_model.evaluation.token_counts import Counts
from apertus_model.files import local_file
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.tokenizer_files import open_tokenizer
from infra.store import Attempt
from specs.stages.evaluate_tokenizers import TokenCountsPart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. SourceError for a folder whose tokenizer.json cannot be read, TokenizerError for one
    that is no tokenizer."""
    part = TokenCountsPart.model_validate(attempt.job.spec)
    if part.path is None:
        tokenizer = open_tokenizer(attempt.input_artifact("tokenizer").local("tokenizer.json"))
    else:
        url = f"{part.path.rstrip('/')}/tokenizer.json"
        tokenizer = open_tokenizer(local_file(url, attempt.workdir / "tokenizer.json"), url)
    text = attempt.input_artifact("text")
    languages, lines, counts = text.manifest.facts["languages"], list(Rows(text)), Counts(tokenizer)
    ids = [line["id"] for line in lines]
    for number, language in enumerate(languages):
        progress.update(number, len(languages), "languages")
        counts.add(language, ids, [line["texts"][language] for line in lines])
    counts.write(attempt.workdir / "counts.parquet")
    attempt.put(attempt.workdir / "counts.parquet", "counts.parquet")
    progress.update(len(languages), len(languages), "languages")
    attempt.commit(
        metrics={"tokens": counts.tokens, "vocabulary": counts.vocabulary, **counts.of_vocabulary()}
    )
