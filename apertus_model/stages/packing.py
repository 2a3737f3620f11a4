"""Best-fit packing of one corpus for one sequence length. Artifact: `rows.npy`, `begins.npy`, `lengths.npy`
(`apertus_model.data.tokens.best_fit`).

The manifest has the number of rows, the share of padding, and the share of tokens in documents that are cut,
both by this packing and by splitting concatenated documents instead.
"""

import shutil

from apertus_model.data.tokens.best_fit import TABLES, RowsWriter
from apertus_model.data.tokens.stream import document_sizes
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from specs.stages.training import PackingPart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    length = PackingPart.model_validate(attempt.job.spec).sequence_length
    corpus = attempt.input_artifact("corpus")
    shards = corpus.manifest.facts["train"]
    folder = attempt.workdir / "rows"
    writer = RowsWriter(folder, length)
    for number, shard in enumerate(shards, start=1):
        writer.add(document_sizes(corpus, shard))
        progress.update(number, len(shards), "shards")
    packed = writer.close()
    for name in TABLES:
        attempt.put(folder / f"{name}.npy", f"{name}.npy")
    shutil.rmtree(folder)
    shares = {
        "padding": packed.padding / (packed.rows * length) if packed.rows else 0.0,
        "cropped": packed.cropped_tokens / packed.tokens if packed.tokens else 0.0,
        "cropped_by_windows": packed.cropped_by_windows / packed.tokens if packed.tokens else 0.0,
    }
    progress.log(
        f"{packed.documents} documents in {packed.rows} rows of {length} tokens: {shares['padding']:.2%}"
        f" padding; {shares['cropped']:.1%} of the tokens are in documents that are cut (concatenated,"
        f" {shares['cropped_by_windows']:.1%} would be)"
    )
    attempt.commit(metrics={**packed._asdict(), **{f"share/{name}": share for name, share in shares.items()}})
