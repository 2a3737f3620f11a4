"""What the markers of a store promise, checked from outside: a few lines of JSON and SHA-256, none of the
store's own code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import fsspec


def damaged(fs: fsspec.AbstractFileSystem, root: str) -> list[str]:
    """Files that a marker names and that are not there, or not with the bytes that it states, but for those
    that a mark says were used up; and markers that are no JSON."""
    return [path for path, record in _named(fs, root) if record is None or record != _found(fs, path, record)]


def _named(fs: fsspec.AbstractFileSystem, root: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    elsewhere = ("/attempts/", "/damaged/")  # of which the latter has copies of markers that were withdrawn
    for marker in sorted(
        path
        for path in fs.find(root, refresh=True)
        if path.endswith(".json") and not any(map(path.__contains__, elsewhere))
    ):
        artifact, _, name = marker.rpartition("/")
        try:
            document = json.loads(fs.cat_file(marker))
        except ValueError:
            yield marker, None
            continue
        if name.startswith("manifest"):
            folder = f"{artifact}/attempts/{document['attempt']}"
        elif artifact.endswith("/checkpoints"):
            folder = (
                f"{artifact.removesuffix('/checkpoints')}/attempts/{document['attempt']}/{document['folder']}"
            )
        elif artifact.endswith("/units"):
            folder = ""  # every record has its path
        else:
            continue
        for file, record in document["files"].items():
            yield (
                f"{root}/{record['path']}" if "path" in record else f"{folder}/{file}",
                {key: record[key] for key in ("size", "sha256")},
            )


def _found(fs: fsspec.AbstractFileSystem, path: str, stated: dict[str, Any]) -> dict[str, Any] | None:
    try:
        data = fs.cat_file(path)
    except FileNotFoundError:
        folder, _, name = path.rpartition("/")
        return stated if fs.exists(f"{folder}/.{name}.used") else None
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
