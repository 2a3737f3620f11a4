"""The `model_folder` part: copies a Hugging Face folder of any architecture as it is.

Artifact: the files of the folder that transformers and vLLM read: config, weights in safetensors, tokenizer,
chat template. Other parts open it as they open an export.

Invariant: no code of the folder is kept or run; one file at a time is in scratch.
"""

import fsspec

from apertus_model.files import local_file
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.sources import resolve_url
from specs.stages.hugging_face import ModelFolderPart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Copies the files. SourceError when one cannot be read."""
    part = ModelFolderPart.model_validate(attempt.job.spec)
    url = resolve_url(part.url).rstrip("/")
    fs, _ = fsspec.core.url_to_fs(url)
    present = [name for name in part.files if fs.exists(f"{url}/{name}")]
    if "config.json" not in present:
        raise SourceError(f"{part.url} no longer has a config.json")
    for done, name in enumerate(present):
        copy = attempt.workdir / name
        attempt.put(local_file(f"{url}/{name}", copy), name)
        copy.unlink(missing_ok=True)
        progress.update(done + 1, len(present), "files")
    attempt.commit(metrics={"files": len(present)})
