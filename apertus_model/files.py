"""Folders outside the store that a library wants to open: copied to local scratch.

Invariant: only files that the globs choose are copied, each below the target folder.
"""

from __future__ import annotations

from pathlib import Path

import fsspec

from infra.store.inputs import SourceError, list_source
from specs.sources import SourceSpec


def copy_folder(url: str, target: Path, include: list[str]) -> Path:
    """Copies the files below `url` (any fsspec URL, or `installed:...`) that match `include`; the local folder.

    SourceError when there are none, or one cannot be read.
    """
    listing = list_source(SourceSpec(url=url, format="text", include=include))
    fs, root = fsspec.core.url_to_fs(listing.url)
    for file in listing.files:
        local = target / file.path
        if ".." in local.parts:
            raise SourceError(f"'{file.path}' of {url} leads out of its folder")
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            fs.get_file(f"{root.rstrip('/')}/{file.path}", str(local))
        except OSError as error:
            raise SourceError(f"cannot read '{file.path}' of {url}: {error}") from error
    return target
