"""The `token_counts` part: counts the tokens of parallel text with one tokenizer.

Artifact: `counts.parquet` (`apertus_model.evaluation.token_counts`). Metrics: `tokens`, `vocabulary`, and the
measures of the vocabulary.
"""

from pathlib import Path

import fsspec
from tokenizers import Tokenizer

from apertus_model.data.rows import Rows
from apertus_model.evaluation.token_counts import Counts
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.tokenizer_files import open_tokenizer
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.sources import resolve_url
from specs.stages.evaluate_tokenizers import TokenCountsPart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. SourceError for a folder without a usable tokenizer."""
    part = TokenCountsPart.model_validate(attempt.job.spec)
    if part.path is None:
        tokenizer = open_tokenizer(attempt.input_artifact("tokenizer").local("tokenizer.json"))
    else:
        tokenizer = _of_folder(part.path, attempt.workdir)
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


def _of_folder(url: str, workdir: Path) -> Tokenizer:
    """The tokenizer of a folder. SourceError when its tokenizer.json cannot be read."""
    local = workdir / "tokenizer.json"
    try:
        fs, root = fsspec.core.url_to_fs(resolve_url(url))
        fs.get_file(f"{root.rstrip('/')}/{local.name}", str(local))
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(
            f"cannot read {local.name} of the tokenizer folder {url}: {type(error).__name__}: {error}"
        ) from error
    try:
        return open_tokenizer(local)
    except Exception as error:  # the library raises nothing narrower
        raise SourceError(f"{local.name} of the tokenizer folder {url} cannot be read: {error}") from error
