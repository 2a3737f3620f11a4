"""The `parallel_text` part: lines of several languages, checked and put into one order.

Artifact: `lines-*.jsonl`, a row for each line: `{"id", "texts": {language: text}}`. Facts: `languages`,
sorted; `with_words`, those whose words are separated by white space; and the facts that `Rows` reads.
"""

from __future__ import annotations

from apertus_model.data.corpora.parallel_text import read_parallel
from apertus_model.data.corpora.words import has_spaces
from apertus_model.data.rows import write_rows
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from specs.job import Job
from specs.stages.evaluate_tokenizers import ParallelTextPart


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. SourceError for text that is not parallel."""
    part = ParallelTextPart.model_validate(job.spec)
    progress.update(0, 1, "texts")
    text = read_parallel(part)
    rows = write_rows(attempt, "lines", ({"id": id_, "texts": line} for id_, line in text.lines.items()))
    with_words = [one for one in text.languages if has_spaces(line[one] for line in text.lines.values())]
    without = sorted(set(text.languages) - set(with_words))
    progress.log(
        f"{len(text.lines):,} lines in {len(text.languages)} languages: {', '.join(text.languages)}"
        + (f"; {text.left_out:,} incomplete lines are left out" if text.left_out else "")
        + (f"; without words between spaces: {', '.join(without)}" if without else "")
    )
    progress.update(1, 1, "texts")
    attempt.commit(
        metrics={
            "lines": len(text.lines),
            "languages": len(text.languages),
            "left_out": text.left_out,
            "bytes": {
                one: sum(len(line[one].encode()) for line in text.lines.values()) for one in text.languages
            },
        },
        facts={"languages": text.languages, "with_words": with_words, **rows},
    )
