"""The tasks of lm-evaluation-harness by name, read from task files without importing the harness or torch.

A plan has to know what `mmlu` stands for and which data it reads. The harness itself answers this only by
importing torch and parsing all of its 14,000 task files, which takes most of a minute. Here one pass over the
files finds their names with a regular expression, and only those that a recipe needs are parsed.

Invariant: what a name stands for is what `lm_eval.tasks.TaskManager` makes of it: files in the order of their
paths, the first file of a name in a folder, the last folder of a name; the settings of a group override those
of its tasks. Nothing of a task file is executed.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from yaml import TagToken, YAMLError

from infra.store.reading.artifact import cache_folder
from specs.errors import StageError

Config = dict[str, Any]
"""The content of a task file, `include:` resolved: whatever YAML holds, with `Function` for `!function`."""
GROUP_FIELDS = {"group", "group_alias", "task", "aggregate_metric_list", "metadata"}
HEADING = re.compile(
    rb"^[\"']?(task|group|tag|include|class)[\"']?[ \t]*:"
    rb"(?P<value>.*(?:\n(?:[ \t]+\S|-[ \t]|#).*|\n[ \t]*(?=\n))*)",
    re.M,
)
PLAIN = re.compile(rb"[ \t]*([\"']?)([\w./+-]+)\1[ \t]*(?:#.*)?\r?")
ITEM = re.compile(rb"^[ \t]*- ([\w./+-]+)[ \t]*\r?$", re.M)
LIST = re.compile(rb"[ \t]*\r?(?:\n[ \t]*- [\w./+-]+[ \t]*\r?)+\s*")
INDEX_FORMAT = 1
"""The version of the stored index; raised when its format changes."""
IGNORED = {"__pycache__", ".ipynb_checkpoints"}


class HarnessError(StageError):
    """The harness is not installed, or a task cannot be run."""


@dataclass(frozen=True)
class Function:
    """`!function name` in a task file: code of the harness that a task uses."""

    name: str
    folder: Path


@dataclass(frozen=True)
class Task:
    """A task that a suite runs."""

    name: str
    config: Config = field(repr=False, hash=False, compare=False)
    # the groups that it was found by, the outermost first, with the contents of their files
    groups: Mapping[str, Config] = field(default_factory=dict, repr=False, hash=False, compare=False)

    def text(self, key: str) -> str:
        """A setting that is text; "" if it is not stated."""
        value = self.config.get(key)
        return value if isinstance(value, str) else ""


@cache
def installed_version() -> str | None:
    """The version of the installed harness, or None. Imports nothing."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def installed_folder() -> Path:
    """The folder of the installed harness's task files. HarnessError when it is not installed."""
    package = importlib.util.find_spec("lm_eval")
    if package is None or not package.submodule_search_locations:
        raise HarnessError(
            "lm-evaluation-harness is not installed. Fix: pip install 'apertus[harness]', or leave harness"
            " out"
        )
    return Path(next(iter(package.submodule_search_locations))).resolve() / "tasks"


class Catalogue:
    """Tasks, groups and tags by name, of the installed harness and of folders of own task files."""

    def __init__(self, *own: Path) -> None:
        """`own`: local folders of task files, which come before the harness's. HarnessError when the harness
        is not installed."""
        self.own = own
        self._files: dict[str, str] = {}
        self._groups: set[str] = set()
        self._tags: dict[str, list[str]] = {}
        self._read: set[str] = set()
        for folder in (installed_folder(), *own):
            index = _own_index(folder) if folder in own else _installed_index(folder)
            self._files |= index.files
            self._groups = (self._groups - set(index.files)) | index.groups
            for tag, tasks in index.tags.items():
                self._tags.setdefault(tag, []).extend(tasks)

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._tags

    @property
    def names(self) -> list[str]:
        """The names of all tasks, groups and tags."""
        return sorted({*self._files, *self._tags})

    def is_tag(self, name: str) -> bool:
        """Whether a name stands for tasks that the harness does not aggregate."""
        return name in self._tags and name not in self._files

    def tasks(self, name: str) -> list[Task]:
        """The tasks that a name stands for. HarnessError for a name that does not exist."""
        return list(self._members(name, {}, {}))

    def folders(self, names: Iterable[str]) -> list[Path]:
        """The folders of the harness with all task files that the names stand for, none inside another, so
        that the harness need not read its other folders. Folders whose files come first are last."""
        own = tuple(f"{folder}/" for folder in self.own)
        folders = set()
        for name in names:
            self._read = set()
            self.tasks(name)
            if directories := [os.path.dirname(path) for path in self._read if not path.startswith(own)]:
                # one folder for all members: the harness replaces a tag of one folder by that of the next
                folders |= {os.path.commonpath(directories)} if self.is_tag(name) else set(directories)
        parents = tuple(f"{folder}/" for folder in folders)
        outer = [folder for folder in sorted(folders) if not folder.startswith(parents)]
        return [Path(folder) for folder in reversed(outer)]

    def _load(self, name: str) -> Config:
        self._read.add(self._files[name])
        return load_config(self._files[name])

    def _members(self, name: str, overrides: Config, groups: Mapping[str, Config]) -> Iterator[Task]:
        if name in groups:
            raise HarnessError(f"the group {name} of the harness contains itself")
        if name in self._groups:
            yield from self._group(name, self._load(name), overrides, groups)
        elif name in self._files:
            config = {**self._load(name), **overrides}
            yield Task(str(config.get("task", name)), config, groups)
        elif name in self._tags:
            for task in sorted(set(self._tags[name])):
                yield from self._members(task, {**overrides, "task": task} if groups else overrides, groups)
        else:
            raise HarnessError(f"there is no task {name} in the harness")

    def _group(
        self, name: str, config: Config, overrides: Config, outer: Mapping[str, Config]
    ) -> Iterator[Task]:
        groups = {**outer, name: config}
        below = {key: value for key, value in config.items() if key not in GROUP_FIELDS} | overrides
        members = config.get("task")
        for member in members if isinstance(members, list) else []:
            if isinstance(member, str):
                member = {"task": member}
                settings = dict(below)
            elif "group" in member:
                inline = {key: value for key, value in member.items() if key != "group"}
                if member["group"] in self._files:
                    yield from self._members(member["group"], below | inline, groups)
                else:
                    yield from self._group(f"{name}::{member['group']}", member, below, groups)
                continue
            else:
                settings = below | member
            base = member["task"]
            if base in self:
                settings = {key: value for key, value in settings.items() if key not in ("group",)}
                nested = base in self._groups
                yield from self._members(base, settings if nested else {"task": base, **settings}, groups)
            else:
                own = f"{name}::{base}"
                yield Task(own, {**settings, "task": own}, groups)


@dataclass(frozen=True)
class _Index:
    files: dict[str, str]  # of tasks and groups
    groups: set[str]
    tags: dict[str, list[str]]


@cache
def _installed_index(folder: Path) -> _Index:
    """The same as `_own_index`, but stored on this machine for each version of the harness, whose files are
    read only once."""
    key = json.dumps([INDEX_FORMAT, str(folder), installed_version(), folder.stat().st_mtime_ns])
    kept = cache_folder() / f"harness-tasks-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if kept.is_file():
        stored = json.loads(kept.read_bytes())
        return _Index(stored["files"], set(stored["groups"]), stored["tags"])
    index = _own_index(folder)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"files": index.files, "groups": sorted(index.groups), "tags": index.tags}))
    os.replace(partial, kept)
    return index


def _own_index(folder: Path) -> _Index:
    """The names in all task files below a folder. A file that is not a task file is skipped."""
    headings = _Headings()
    files: dict[str, str] = {}
    groups: set[str] = set()
    tags: dict[str, list[str]] = {}
    for path in _yaml_files(folder):
        heading = headings.of(path)
        group = heading.get("group") if "class" not in heading else None
        name = heading.get("task") if group is None else group
        if not isinstance(name, str) or name in files:
            continue
        files[name] = path
        if group is not None:
            groups.add(name)
        else:
            for tag in _listed(heading.get("tag")):
                tags.setdefault(tag, []).append(name)
    return _Index(files, groups, tags)


def _yaml_files(folder: Path) -> list[str]:
    paths = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in IGNORED]
        paths += [f"{root}/{name}" for name in names if name.endswith(".yaml")]
    return sorted(paths)


class _Headings:
    """The keys of task files by which they are found, each file read once."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def of(self, path: str, within: tuple[str, ...] = ()) -> dict[str, Any]:
        """The keys of a file and of what it includes; none for a file that cannot be read."""
        if path not in self._known and path not in within:
            own: dict[str, Any] = {}
            try:
                with open(path, "rb", buffering=0) as stream:
                    content = stream.readall()
                own = {match[1].decode(): _value(match["value"]) for match in HEADING.finditer(content)}
            except (OSError, ValueError, HarnessError):
                pass  # not a task file
            heading: dict[str, Any] = {}
            for name in _listed(own.pop("include", None)):
                other = os.path.normpath(os.path.join(os.path.dirname(path), name))
                heading |= self.of(other, (*within, path))
            self._known[path] = heading | own
        return self._known.get(path, {})


def _value(written: bytes) -> Any:
    if (plain := PLAIN.fullmatch(written)) is not None:
        return plain[2].decode()
    if LIST.fullmatch(written):
        return [item.decode() for item in ITEM.findall(written)]
    return _parse(b"value:" + written, Path("/")).get("value")


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)] if value else []


def load_config(path: str, within: tuple[str, ...] = ()) -> Config:
    """A task file with what it includes. HarnessError for a file that cannot be read. `within`: the files
    that include it."""
    path = os.path.normpath(path)
    if path in within:
        raise HarnessError(f"the task file {path} includes itself")
    try:
        config = dict(_parsed(path, os.stat(path).st_mtime_ns))
    except OSError as error:
        raise HarnessError(f"cannot read the task file {path}: {error}") from error
    merged: Config = {}
    for name in _listed(config.pop("include", None)):
        other = load_config(os.path.join(os.path.dirname(path), name), (*within, path))
        other.pop("task_list", None)
        merged |= other
    return merged | config


@cache
def _parsed(path: str, changed: int) -> Config:
    """A task file without its includes. `changed`: its time of change, so that changed content is read
    again."""
    return _parse(Path(path).read_bytes(), Path(path).parent)


class _Loader(yaml.CSafeLoader):
    """A loader that knows `!function` in files of its folder, and no other tag that is code."""

    folder: Path


_Loader.add_constructor(
    "!function", lambda loader, node: Function(str(loader.construct_scalar(node)), loader.folder)
)


def _parse(content: bytes, folder: Path) -> Config:
    """Parses YAML as a mapping. HarnessError when it is not a mapping, or has a tag other than
    `!function`."""
    loader = _Loader(content)
    loader.folder = folder
    try:
        config = loader.get_single_data()
    except YAMLError as error:
        raise HarnessError(f"a task file in {folder} is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise HarnessError(f"a task file in {folder} is not a mapping")
    return config


def functions(value: Any) -> Iterator[Function]:
    """Yields the functions that a setting names, as parsed from YAML."""
    if isinstance(value, Function):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            if not isinstance(item, str):
                yield from functions(item)


def resolve(catalogue: Catalogue, names: Iterable[str]) -> dict[str, list[Task]]:
    """The tasks of each name. HarnessError for names that do not exist, and for a task that two names of the
    suite have, which the harness refuses."""
    names = list(names)
    members = {name: catalogue.tasks(name) for name in names}
    owner: dict[str, str] = {}
    for name, tasks in members.items():
        for task in tasks:
            if owner.setdefault(task.name, name) != name:
                raise HarnessError(f"{owner[task.name]} and {name} both have the task {task.name}")
    return members


@cache
def _tag_or_included(text: str) -> tuple[TagToken | None, list[Any]]:
    """The first tag of a task file, and the files that it includes if it has no tag. YAMLError for a file
    that is not YAML."""
    tokens = yaml.scan(text, yaml.CSafeLoader)
    if (tag := next((token for token in tokens if isinstance(token, TagToken)), None)) is not None:
        return tag, []
    content = yaml.load(text, yaml.CSafeLoader)
    included = content.get("include", []) if isinstance(content, dict) else []
    return None, included if isinstance(included, list) else [included]


def check_tasks(folder: Path) -> None:
    """Raises HarnessError for a task file that could name code to run: by a YAML tag, or by including an
    unchecked file."""
    for path in sorted(folder.rglob("*.yaml")):
        name = path.relative_to(folder)
        try:
            tag, included = _tag_or_included(path.read_text("utf-8", errors="replace"))
        except YAMLError as error:
            raise HarnessError(f"task file {name} is not YAML: {error}") from error
        if tag is not None:
            written = "".join(part for part in tag.value if part)
            raise HarnessError(
                f"task file {name}, line {tag.start_mark.line + 1}, has the tag '{written}': tags run code,"
                " and task files may not. Fix: use a template, or prepare the data before"
            )
        for other in included:
            target = (path.parent / str(other)).resolve()
            if target.suffix != ".yaml" or not target.is_relative_to(folder.resolve()):
                raise HarnessError(
                    f"task file {name} includes '{other}'. Fix: include .yaml files of the same folder only"
                )
