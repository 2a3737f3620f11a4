"""Identifies documents outside the store by their content.

A source enters a fingerprint as the digest of its (relative path, SHA-256 of the content) pairs. Reading
everything to plan would be absurd for large sources, so the store keeps a lock: the digest under a key made
of the listing (relative path, size, etag or mtime). The digest is computed again only when the listing
changes. Beside the lock, under the digest, is a record of the size and SHA-256 of each file, for audits.

Invariant: neither the URL nor the times of files enter the digest, only the lock's key.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import PurePosixPath
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from infra.store.documents import InputFile, Lock, check, sealed
from infra.store.storage.access import check_settings, fix_of
from infra.store.storage.listing import tree
from infra.store.store import CHUNK, Store, StoreError
from specs.base import canonical_json
from specs.errors import StageError
from specs.foreign import ForeignError, check_regular, checked, is_text, parse_json, read_local
from specs.hugging_face_files import SavedDataset
from specs.sources import SourceSpec, resolve_url

STAMPS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "created")
"""The names that filesystems give to the value that changes with a file's content; `blob_id` is that of the
Hugging Face Hub."""
ROWS = ".files.jsonl"
"""The suffix of the record of the files behind a digest."""


class SourceError(StageError):
    """A source that cannot be listed or read. The message names it."""


@dataclass(frozen=True)
class ListedFile:
    """One file: path relative to the source's url, size in bytes, and a stamp that changes when the file
    does."""

    path: str
    size: int
    stamp: str


@dataclass(frozen=True)
class Listing:
    """The files of a source, sorted by path."""

    url: str
    files: tuple[ListedFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def key(self) -> str:
        document = [self.url, [[file.path, file.size, file.stamp] for file in self.files]]
        return hashlib.sha256(canonical_json(document).encode()).hexdigest()[:32]

    @cached_property
    def contents(self) -> dict[str, str]:
        """The SHA-256 of every file, by path. Reads each file once. SourceError names a file that cannot be
        read."""
        fs, root = fsspec.core.url_to_fs(self.url)
        digests: dict[str, str] = {}
        for file in self.files:
            content = hashlib.sha256()
            try:
                with fs.open(_join(root, file.path), "rb") as stream:
                    while chunk := stream.read(CHUNK):
                        content.update(chunk)
            except OSError as error:
                raise SourceError(f"cannot read '{file.path}' of {self.url}: {error}") from error
            digests[file.path] = content.hexdigest()
        return digests

    def digest(self) -> str:
        """The digest of all paths and contents. SourceError names a file that cannot be read."""
        return digest_of(self.contents.items())


def digest_of(contents: Iterable[tuple[str, str]]) -> str:
    """The digest of (path, SHA-256) pairs, in the order of the paths. Fingerprints contain it."""
    total = hashlib.sha256()
    for path, sha256 in contents:
        total.update(canonical_json([path, sha256]).encode() + b"\n")
    return total.hexdigest()[:32]


def _join(root: str, path: str) -> str:
    return f"{root.rstrip('/')}/{path}" if path else root


def list_source(source: SourceSpec) -> Listing:
    """The files below `source.url` that its globs choose. SourceError when there are none, or the url
    cannot be listed."""
    url = resolve_url(source.url)
    try:
        check_settings(url)
        fs, root = fsspec.core.url_to_fs(url)
        entries = _entries(fs, root, source.include, source.exclude)
    except Exception as error:  # filesystems of third parties raise errors of their own kinds
        fix = fix_of(error, url)
        problem = f"cannot list {source.url}: {type(error).__name__}: {error}"
        raise SourceError(f"{problem}; {fix}" if fix else problem) from error
    if isinstance(fs, LocalFileSystem) and not fs.exists(root):
        raise SourceError(f"there is nothing at {source.url}")
    files = []
    for name, entry in entries.items():
        relative = name[len(root.rstrip("/")) :].lstrip("/")
        if relative == "" or (_matches(relative, source.include) and not _matches(relative, source.exclude)):
            _check_name(name, source.url)
            if isinstance(fs, LocalFileSystem) and entry["type"] == "other":  # links have this type, too
                _check_regular(name, source.url)
            stamp = next((entry[key] for key in STAMPS if entry.get(key)), "")
            files.append(ListedFile(relative, int(entry["size"]), str(stamp)))
    if source.format == "arrow":
        files = _of_saved(fs, root, entries, files, source.url)
    if not files:
        raise SourceError(
            f"no file below {source.url} matches include {source.include} without exclude {source.exclude}"
        )
    return Listing(url, tuple(sorted(files, key=lambda file: file.path)))


def _of_saved(
    fs: AbstractFileSystem, root: str, entries: dict[str, Any], files: list[ListedFile], url: str
) -> list[ListedFile]:
    """The files, of a data set that `datasets` saved only its shards: `cache-*.arrow` beside them is what
    programs computed from it. SourceError when several splits would be mixed, or the shards are not the data
    set."""
    kept = {_join(root, file.path): file for file in files}
    for name in entries:
        folder, _, last = name.rpartition("/")
        if last not in ("dataset_dict.json", "state.json"):
            continue
        below = {file: file[len(folder) + 1 :] for file in kept if file.startswith(f"{folder}/")}
        if last == "dataset_dict.json":
            if len(splits := sorted({path.partition("/")[0] for path in below.values()})) > 1:
                raise SourceError(
                    f"{url} would mix the splits {', '.join(splits)} of a data set. Fix: name the folder of"
                    " one as url"
                )
            continue
        try:
            content = read_local(name) if isinstance(fs, LocalFileSystem) else fs.cat_file(name)
            shards = checked(SavedDataset, parse_json(content)).shards
        except (OSError, ForeignError) as error:
            raise SourceError(f"cannot read '{name}' of {url}: {error}") from error
        if shards is None:  # of another program
            continue
        named = {shard.filename for shard in shards}
        if missing := sorted(shard for shard in named if f"{folder}/{shard}" not in entries):
            raise SourceError(
                f"'{name}' of {url} names {missing[0]}, which is missing. Fix: copy the whole data set"
            )
        for file in [file for file, path in below.items() if "/" not in path and path not in named]:
            del kept[file]
    return list(kept.values())


def _check_name(path: str, url: str) -> None:
    """Raises SourceError for a name that no record can hold: Linux allows any bytes."""
    if not is_text(path):
        raise SourceError(
            f"the name of a file of {url} is not UTF-8: {os.fsencode(path)!r}. Fix: rename it, or exclude it"
        )


def _check_regular(path: str, url: str) -> None:
    try:
        check_regular(path)
    except (ForeignError, OSError) as error:
        raise SourceError(f"cannot read '{path}' of {url}: {error}") from error


def _entries(fs: AbstractFileSystem, root: str, include: list[str], exclude: list[str]) -> dict[str, Any]:
    """The files below a folder, or the file itself. A folder is not entered when nothing in it can match, or
    when it is excluded as a whole (`name/**`); a folder that is entered and cannot be listed is an error,
    since its files would be missing from the digest."""
    if isinstance(fs, LocalFileSystem) and fs.isfile(root):
        return {root: fs.info(root)}
    prunable = [glob.removesuffix("/**") for glob in exclude if glob.endswith("/**")]

    def enter(folder: str) -> bool:
        relative = folder[len(root.rstrip("/")) :].lstrip("/")
        return not _matches(relative, prunable) and any(_leads_to(relative, glob) for glob in include)

    return tree(fs, root, enter=enter)


def _leads_to(folder: str, glob: str) -> bool:
    """Whether files below a folder can match a glob."""
    pattern = _pattern(glob)
    for index, part in enumerate(folder.split("/")):
        if index < len(pattern) and pattern[index] == "**":
            return True
        if index >= len(pattern) - 1:
            return False
        if not fnmatchcase(part, pattern[index]):
            return False
    return True


def _matches(path: str, globs: list[str]) -> bool:
    parts = tuple(path.split("/"))
    return any(_glob(parts, _pattern(glob)) for glob in globs)


@cache
def _pattern(glob: str) -> tuple[str, ...]:
    return PurePosixPath(glob).parts


def _glob(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether a path matches a pattern: `**` is any number of folders, other parts match one name, as in
    `fnmatch`. The names after the last `**` are compared first, which settles most files."""
    if not pattern:
        return not path
    if pattern[-1] != "**":
        return bool(path) and fnmatchcase(path[-1], pattern[-1]) and _glob(path[:-1], pattern[:-1])
    return pattern == ("**",) or any(_glob(path[:kept], pattern[:-1]) for kept in range(len(path) + 1))


def locked_digest(store: Store, listing: Listing) -> str | None:
    """The digest that the store recorded for this listing, or None."""
    path = f"inputs/{listing.key}.json"
    document = store.read_json_if_there(path)
    return None if document is None else check(Lock, document, store.where(path)).digest


def recorded_digest(store: Store, path: str) -> str | None:
    """The digest that a file in `inputs/` is about; None for a file that is no record. DamagedError for a
    damaged lock."""
    if path.endswith(ROWS):
        return path.removeprefix("inputs/").removesuffix(ROWS)
    return store.document(path, Lock).digest if path.endswith(".json") else None


def lock(store: Store, listing: Listing, digest: str) -> None:
    """Records the digest of a listing and, if this process has read the files, the size and SHA-256 of
    each."""
    if "contents" in listing.__dict__:
        sizes = {file.path: file.size for file in listing.files}
        rows = (
            InputFile(path=path, size=sizes[path], sha256=sha256) for path, sha256 in listing.contents.items()
        )
        store.write_once(f"inputs/{digest}{ROWS}", _lines(row.model_dump() for row in rows))
    document = Lock(url=listing.url, digest=digest, bytes=listing.bytes, files=len(listing.files))
    store.write_document(f"inputs/{listing.key}.json", document)


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(sealed(row)) + "\n" for row in rows).encode()


def recorded_files(store: Store, digest: str) -> list[InputFile] | None:
    """The files behind a digest; None if they were not recorded. StoreError for a record that does not make
    the digest."""
    path = f"inputs/{digest}{ROWS}"
    if not store.exists(path):
        return None
    try:
        lines = [store.unsealed(path, json.loads(line)) for line in store.read_bytes(path).splitlines()]
        rows = [checked(InputFile, line) for line in lines]
        if digest_of((row.path, row.sha256) for row in rows) == digest:
            return rows
        problem = f"its files do not make the digest {digest}"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise StoreError(f"{store.where(path)} is damaged: {problem}; delete it")
