"""Lists all files below a folder, on any filesystem.

Invariant: a folder that cannot be listed is an error, never an empty one. fsspec's own walk leaves such a
folder out (`on_error="omit"`, below the first folder whatever is asked for), and code that removes, copies or
fingerprints by such a listing acts on a part of the files.
"""

from collections.abc import Callable
from typing import Any

from fsspec import AbstractFileSystem

Entries = dict[str, dict[str, Any]]


def _once(folder: str, ask: Callable[[], Any]) -> Any:
    return ask()


def tree(
    fs: AbstractFileSystem,
    root: str,
    *,
    call: Callable[[str, Callable[[], Any]], Any] = _once,
    enter: Callable[[str], bool] = lambda folder: True,
    as_file: Callable[[str], bool] = lambda folder: False,
) -> Entries:
    """The details of the files below a folder, by full name; links to folders are not followed.

    Args:
        call: makes each request, given the folder and the function that asks.
        enter: whether files below a folder are wanted. Not asked if the filesystem lists all of a tree at
            once, as object storage does.
        as_file: whether a folder is itself one of the entries, and not entered.

    Raises:
        OSError: a folder cannot be listed. A folder that does not exist, or not any more, has no files.
    """
    if _lists_trees(fs):
        return dict(call(root, lambda: fs.find(root, detail=True)))
    files: Entries = {}
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            entries = call(folder, lambda folder=folder: fs.ls(folder, detail=True))  # type: ignore[misc]  # a default binds it
        except FileNotFoundError:
            continue
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] != "directory" or as_file(name):
                files[name] = entry
            elif name != folder and enter(name):
                folders.append(name)
    return files


def _lists_trees(fs: AbstractFileSystem) -> bool:
    return bool(fs.async_impl) or type(fs).find is not AbstractFileSystem.find
