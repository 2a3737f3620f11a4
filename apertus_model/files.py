"""Copies folders and files from outside the store to local scratch, where libraries can open them.

Invariant: only files that match the globs are copied, each below the target folder.
"""

import os
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from infra.store.inputs import SourceError, list_source
from specs.foreign import MAX_BYTES
from specs.sources import SourceSpec, resolve_url


def copy_folder(url: str, target: Path, include: list[str]) -> Path:
    """Copies the files below `url` (any fsspec URL, or `installed:...`) that match `include`. Returns the
    local folder. SourceError when no file matches, or one cannot be read."""
    listing = list_source(SourceSpec(url=url, format="text", include=include))
    fs, root = fsspec.core.url_to_fs(listing.url)
    for file in listing.files:
        local = target / file.path
        if ".." in local.parts:
            raise SourceError(f"'{file.path}' of {url} is outside its folder")
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            fs.get_file(f"{root.rstrip('/')}/{file.path}", str(local))
        except OSError as error:
            raise SourceError(f"cannot read '{file.path}' of {url}: {error}") from error
    return target


def local_file(url: str, target: Path) -> Path:
    """A file as a local path: the file itself, or a copy of a remote one at `target`, made whole or not at
    all. SourceError when it cannot be read."""
    try:
        fs, path = fsspec.core.url_to_fs(resolve_url(url))
    except (ValueError, ImportError) as error:
        raise SourceError(f"cannot read {url}: {error}") from error
    if isinstance(fs, LocalFileSystem):
        if not Path(path).is_file():
            raise SourceError(f"there is no file {url}")
        return Path(path)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            fs.get_file(path, str(partial))
        except (OSError, ValueError) as error:
            raise SourceError(f"cannot read {url}: {error}") from error
        os.replace(partial, target)
    return target


def read_text(url: str) -> str:
    """A small file of text in UTF-8, without a byte order mark. SourceError when it cannot be read."""
    try:
        fs, path = fsspec.core.url_to_fs(resolve_url(url))
        if fs.size(path) > MAX_BYTES:
            raise SourceError(f"{url} has more than {MAX_BYTES:,} bytes")
        text: str = fs.cat_file(path).decode("utf-8-sig")
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(f"cannot read {url}: {error}") from error
    return text
