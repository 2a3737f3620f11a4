"""The data of tasks of lm-evaluation-harness, from snapshots of data sets in a folder.

`<datasets>/allenai/ai2_arc/` is a data set as a download of its repository gives it: the data files, and the
README whose `configs:` name the subsets. Tasks stay as they are: they call `datasets.load_dataset` with the
id of a data set, and `Snapshots` answers from the folder. The library itself finds subsets and splits, in a
folder with links to the files; a plan asks it too, with empty files in their place.

Invariants: nothing is fetched; no code of a data set is run, since Python files are not in that folder.
"""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import fsspec
import yaml
from fsspec.implementations.local import LocalFileSystem

from apertus_model.evaluation.harness.needs import HUB, NLTK, NOT_DATA, PACKAGED, Reads, placed
from apertus_model.evaluation.harness.tasks import HarnessError
from apertus_model.files import copy_folder
from infra.store.inputs import Listing
from infra.store.scratch import temporary_folder
from specs.sources import SourceSpec, resolve_url

IGNORED = [".cache/**", ".git/**", ".gitattributes", ".gitignore"]
"""The files that a download leaves beside those of a data set; not part of its content."""
CARD = "README.md"
CONVERTED = "refs/convert/parquet"
"""Branch of the Hub with the Parquet files of a data set whose repository has a loading script."""


def snapshot_source(datasets: str, dataset: str) -> SourceSpec:
    """The files of one data set. ValueError for a URL that is not valid."""
    return SourceSpec(url=f"{datasets.rstrip('/')}/{dataset}", format="text", exclude=IGNORED)


def local_snapshots(datasets: str, names: Iterable[str], scratch: Path) -> Path:
    """A local folder with the data sets: links, or copies of remote ones. SourceError as `copy_folder`."""
    url = resolve_url(datasets)
    fs, root = fsspec.core.url_to_fs(url)
    if isinstance(fs, LocalFileSystem):
        return Path(root)
    for name in names:
        copy_folder(f"{url.rstrip('/')}/{name}", scratch / name, ["**/*"])
    return scratch


class Snapshots:
    """A local folder of data sets that answers the calls by which tasks ask for data."""

    def __init__(self, folder: Path | None, scratch: Path) -> None:
        """`folder`: data sets by id; None if no task reads one. `scratch`: an empty local folder."""
        self.folder = folder
        self.scratch = scratch
        self._load: Callable[..., Any] | None = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, `datasets.load_dataset`, `requests.get` and NLTK read from the folder."""
        from unittest import mock

        import datasets
        import requests

        self._load = datasets.load_dataset
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(datasets, "load_dataset", self.load_dataset))
            stack.enter_context(mock.patch.object(datasets.load, "load_dataset", self.load_dataset))
            stack.enter_context(mock.patch.object(requests, "get", self.get))
            if self.folder is not None and (self.folder / NLTK).is_dir():
                stack.enter_context(mock.patch.dict(os.environ, {"NLTK_DATA": str(self.folder / NLTK)}))
                with contextlib.suppress(ImportError):
                    import nltk

                    stack.enter_context(mock.patch.object(nltk.data, "path", [str(self.folder / NLTK)]))
            yield

    def load_dataset(self, path: str, name: str | None = None, **arguments: Any) -> Any:
        """`datasets.load_dataset` on a snapshot. HarnessError for a missing data set, subset or split."""
        assert self._load is not None, "called in place"
        kept = {key: value for key, value in arguments.items() if key not in NOT_DATA}
        kept["cache_dir"] = str(self.scratch / ".prepared")
        if path in PACKAGED:
            return self._load(path, name, **{**kept, "data_files": self._placed(kept.get("data_files"))})
        view = self._view(path)
        called = f"the data set {path}" + (f", subset {name}," if name else "")
        try:
            return self._load(str(view), **library_arguments(view, name, kept))
        except (OSError, ValueError, RuntimeError, TypeError) as error:
            raise HarnessError(
                f"{called} cannot be read: {type(error).__name__}: {error}."
                f" Fix: replace its files in {self.folder}"
            ) from error

    def get(self, url: str, **_: Any) -> Any:
        """`requests.get` of a web file that is stored beside the data sets."""
        import requests

        response = requests.Response()
        response.status_code, response.encoding = 200, "utf-8"
        response.raw = io.BytesIO(self._file(url).read_bytes())
        return response

    def _view(self, dataset: str) -> Path:
        """A folder with links to the files of a data set that are not code."""
        source = None if self.folder is None else self.folder / dataset
        if source is None or not source.is_dir():
            raise HarnessError(f"the data set {dataset} is not in {self.folder}")
        view = self.scratch / dataset
        if not view.exists():
            files = (path for path in sorted(source.rglob("*")) if path.is_file())
            lay_out(view, ((path.relative_to(source).as_posix(), path) for path in files))
        return view

    def _file(self, url: str) -> Path:
        path = (self.folder or self.scratch) / placed(url)
        if not path.is_file():
            raise HarnessError(f"the file {url} is not at {path}")
        return path

    def _placed(self, files: Any) -> Any:
        """The paths of data files, with local paths in place of web addresses."""
        if isinstance(files, str):
            return str(self._file(files)) if files.startswith((*HUB, "http://", "https://")) else files
        if isinstance(files, dict):
            return {split: self._placed(value) for split, value in files.items()}
        return [self._placed(value) for value in files] if isinstance(files, list | tuple) else files


def lay_out(view: Path, files: Iterable[tuple[str, Path | bytes]]) -> None:
    """Makes a folder with links to files, or files of the given contents, without code and hidden files."""
    view.mkdir(parents=True)
    for name, content in files:
        hidden = any(part.startswith(".") and part != ".huggingface.yaml" for part in name.split("/"))
        if hidden or name.endswith(".py"):
            continue
        target = view / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            target.symlink_to(content.resolve())


def library_arguments(view: Path, name: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by which `datasets` finds a subset in a local folder: by the card's `configs:`, else by
    the name of a folder, which is how the Hub lays out converted data sets."""
    named = card_subsets(view)
    folder = name or "default"
    if folder not in named and (view / folder).is_dir() and "data_dir" not in arguments:
        return {**arguments, "data_dir": folder}
    return {**arguments, "name": name}


def card_subsets(view: Path) -> list[str]:
    """The subsets that the card of a data set names. HarnessError for a card that is not YAML."""
    card = view / CARD
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    if not text.startswith("---"):
        return []
    try:
        values = yaml.load(text.split("---", 2)[1], Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise HarnessError(f"{CARD} of the data set {view.name} is not YAML: {error}") from error
    configs = values.get("configs") if isinstance(values, dict) else None
    return [str(config.get("config_name")) for config in configs or [] if isinstance(config, dict)]


class Snapshot:
    """A data set in a folder as plans see it: the listing of its files, without their contents."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self._fs, self._root = fsspec.core.url_to_fs(listing.url)

    @property
    def script(self) -> str | None:
        """The loading script of a data set whose repository has one in place of data."""
        name = f"{Path(self.listing.url).name}.py"
        return name if self._has(name) else None

    def missing(self, reads: Reads) -> str | None:
        """A description of what a task needs and the data set lacks; None when it lacks nothing."""
        if (web_file := dict(reads.arguments).get("file")) is not None:
            name = str(web_file).split("/", 2)[-1]
            return None if self._has(name) else f"there is no file {name}"
        import datasets

        with temporary_folder("dataset") as scratch:
            view = scratch / "view"
            lay_out(view, ((file.path, self._content(file.path)) for file in self.listing.files))
            try:
                arguments = library_arguments(view, reads.subset, dict(reads.arguments))
                builder = datasets.load_dataset_builder(
                    str(view), **arguments, cache_dir=str(scratch / "cache")
                )
                files = builder.config.data_files or {}
            except (OSError, ValueError, RuntimeError, TypeError) as error:
                if self.script is not None:
                    return f"it has the loading script {self.script} in place of data, and no code is run"
                what = f"subset {reads.subset}" if reads.subset else "data"
                first = str(error).splitlines()[0].replace(f"{view}", self.listing.url)
                return f"no {what}: {first}"
            base = view.resolve()
            for split in reads.splits:
                if split not in files:
                    has = ", ".join(map(str, files)) or "none"
                    return f"no split {split}{_of(reads)}; it has {has}"
                path = Path(next(iter(files[split]))).resolve()
                if (columns := self._columns(path.relative_to(base).as_posix())) is not None and (
                    lacking := [column for column in reads.columns if column not in columns]
                ):
                    where = f"split {split}{_of(reads)}"
                    return f"no column {', '.join(lacking)} in {where}; it has {', '.join(columns)}"
        return None

    def _has(self, name: str) -> bool:
        return any(file.path == name for file in self.listing.files)

    def _content(self, name: str) -> bytes:
        """The content of a small file that the library reads to find the others; empty for other files."""
        if Path(name).name in (CARD, ".huggingface.yaml", "dataset_infos.json"):
            return bytes(self._fs.cat_file(f"{self._root.rstrip('/')}/{name}"))
        return b""

    def _columns(self, name: str) -> list[str] | None:
        """The columns of a Parquet or JSON-lines file; None for a file whose columns are not looked up."""
        if not name.endswith((".parquet", ".jsonl")):
            return None
        with self._fs.open(f"{self._root.rstrip('/')}/{name}", "rb") as stream:
            return _parquet_columns(stream) if name.endswith(".parquet") else _json_columns(stream)


def _of(reads: Reads) -> str:
    return f" of subset {reads.subset}" if reads.subset else ""


def _parquet_columns(stream: IO[bytes]) -> list[str] | None:
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_schema(stream).names)
    except (pyarrow.ArrowException, OSError):
        return None  # the run reports it


def _json_columns(stream: IO[bytes]) -> list[str] | None:
    try:
        row = json.loads(stream.readline())
    except ValueError:
        return None
    return list(row) if isinstance(row, dict) else None
