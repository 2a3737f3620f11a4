"""Finds stored artifacts without a recipe: by place, fingerprint, run, or an exported folder.

Invariant: it only reads, and never guesses: a text that fits several artifacts is refused with their list.
"""

import hashlib
import re
from functools import cache
from pathlib import Path

from infra.store import Artifact, Store, StoreError, runs
from infra.store.reading.walk import ARTIFACT

LEAST = 6  # fewest hex digits of a shortened fingerprint
NOT_ARTIFACTS = ("runs", "inputs", "reports", "protected", "damaged")
WEIGHTS = "*.safetensors"
_PLACE = re.compile(
    r"^(?:(?P<kind>[a-z][a-z0-9_]*)/)?(?P<fingerprint>[0-9a-f]+)(?:@(?:step=)?(?P<step>\d+))?$"
)


def find(store: Store, text: str) -> list[Artifact]:
    """The artifacts that a text names: `pretrain/3d74c4`, `3d74c4@step=1200`, `RUN` (its exports, else its
    last part), `RUN:PART`, or an exported local folder. StoreError when it names nothing, or several
    things."""
    if (match := _PLACE.match(text)) and len(match["fingerprint"]) >= LEAST:
        return [_by_fingerprint(store, text, match)]
    if Path(text).is_dir():
        return [find_export(store, Path(text))]
    run, _, part = text.partition(":")
    if run in runs.names(store):
        return _of_run(store, run, part)
    there = ", ".join(runs.names(store)) or "none"
    raise StoreError(
        f"'{text}' is no artifact (kind/fingerprint, or {LEAST} digits of it), no run and no exported folder;"
        f" the runs of {store.url} are {there}"
    )


def _by_fingerprint(store: Store, text: str, match: re.Match[str]) -> Artifact:
    kinds = [name for name in store.names("") if "." not in name and name not in NOT_ARTIFACTS]
    paths = [
        f"{kind}/{name}"
        for kind in ([match["kind"]] if match["kind"] else kinds)
        for name in store.names(kind)
        if name.startswith(match["fingerprint"])
    ]
    paths = [path for path in paths if ARTIFACT.match(path)]
    if len(paths) != 1:
        what = f"fits {', '.join(paths)}; write more digits" if paths else f"is not in the store {store.url}"
        raise StoreError(f"'{text}' {what}")
    artifact = Artifact(store, paths[0], int(match["step"]) if match["step"] else None)
    if artifact.step is None:
        artifact.step = max(artifact.manifest_steps() or artifact.checkpoint_steps(), default=None)
    return artifact


def _of_run(store: Store, run: str, part: str) -> list[Artifact]:
    parts = runs.last(store, run).parts
    if part:
        chosen = [name for name in parts if name == part] or [
            name for name in parts if name.split("/")[0] == part
        ][-1:]
        if not chosen:
            raise StoreError(f"run '{run}' has no part '{part}'; it has {', '.join(parts)}")
    else:
        chosen = [
            name for name, (path, _) in parts.items() if path.startswith("export/") and name.count("/") == 0
        ]
        chosen = [name for name in chosen if Artifact(store, parts[name][0]).complete] or list(parts)[-1:]
    return [Artifact(store, *parts[name]) for name in chosen]


def find_export(store: Store, folder: Path) -> Artifact:
    """The export with the weights and configuration in a folder, byte by byte. StoreError without one."""
    names = ["config.json", *sorted(path.name for path in folder.glob(WEIGHTS))]
    if len(names) < 2 or not (folder / "config.json").is_file():
        raise StoreError(f"'{folder}' has no config.json with {WEIGHTS} beside it: it is no exported model")
    sizes = {name: (folder / name).stat().st_size for name in names}

    @cache
    def digest(name: str) -> str:
        with open(folder / name, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    for fingerprint in store.names("export"):
        artifact = Artifact(store, f"export/{fingerprint}")
        if not artifact.complete:
            continue
        files = artifact.manifest.files
        alike = all(name in files and files[name].size == size for name, size in sizes.items())
        if alike and all(files[name].sha256 == digest(name) for name in names):
            return artifact
    raise StoreError(
        f"no export in the store {store.url} has the weights of '{folder}'; was it changed, or made with"
        " another store?"
    )
