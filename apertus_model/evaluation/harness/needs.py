"""Finds what a task of lm-evaluation-harness needs: data sets with their subsets and splits, files, packages,
a tokenizer; and why it cannot be run here.

Invariant: the needs are found from task files and a table of what their code needs, without the harness,
torch or the data. The table is of one release of the harness, and no other release is used.
"""

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from apertus_model.evaluation.harness.tasks import (
    Config,
    Function,
    HarnessError,
    Task,
    functions,
    installed_folder,
    installed_version,
)
from specs.base import Strict

CODE_EVAL = "code_eval"
"""The metric of the library `evaluate` that runs code of a model; `scoring` computes it in a sandbox."""
USUAL_K = (1, 10, 100)
"""The k of pass@k that the paper of HumanEval reports; they are added where there are enough samples."""
PACKAGED = ("json", "csv", "parquet", "arrow", "text")
"""Readers of files, which a task names in place of a data set."""
HUB = ("https://huggingface.co/datasets/", "hf://datasets/")
NLTK = "nltk_data"
"""Folder, beside the data sets, of the resources of NLTK."""
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
CLASSIFIED = ("metric.toxicity_perspective_api",)
"""Functions of tasks that ask a web service about nothing but an answer, which a local classifier can do as
well."""
NOT_DATA = ("revision", "trust_remote_code", "token", "download_mode", "cache_dir")
"""Arguments of `load_dataset` that say how a data set is fetched, not what it holds."""


class CodeNeeds(Strict):
    """What code of the harness needs that a task file names by `!function`."""

    packages: tuple[str, ...] = ()  # top-level modules that do not come with the harness
    datasets: tuple[tuple[str, str | None, str | None], ...] = ()  # (id, subset, split)
    urls: tuple[str, ...] = ()  # of files that it fetches
    nltk: tuple[str, ...] = ()  # resources of NLTK that it downloads
    services: tuple[str, ...] = ()  # modules by which it uses the network in other ways
    hub_metrics: tuple[str, ...] = ()  # metrics whose code is on the Hub


class CodeTable(Strict):
    """The content of `code_needs.json`, which `python -m tools.harness_needs` makes."""

    harness: str  # the release of the harness
    functions: dict[str, CodeNeeds]  # by `key_of`, without those that need nothing


@cache
def code_table() -> CodeTable:
    """The checked-in table."""
    return CodeTable.model_validate_json(Path(__file__).with_name("code_needs.json").read_bytes())


def check_release() -> None:
    """Raises HarnessError when the needs of the installed harness's tasks are unknown."""
    if installed_version() != (known := code_table().harness):
        raise HarnessError(
            f"lm-evaluation-harness {installed_version()} is installed, and the needs of tasks are known of"
            f" {known}. Fix: pip install lm_eval=={known}"
        )


def key_of(function: Function) -> str:
    """The folder of a function below that of all tasks, and its name: `ifeval/utils.process_results`."""
    return f"{function.folder}/{function.name}".removeprefix(f"{installed_folder()}/")


def code_needs(config: Config) -> CodeNeeds:
    """What the code needs that a task file names."""
    table = code_table().functions
    needs = [table[key] for function in functions(config) if (key := key_of(function)) in table]
    return CodeNeeds(
        **{
            kind: tuple(sorted({value for entry in needs for value in getattr(entry, kind)}, key=str))
            for kind in CodeNeeds.model_fields
        }
    )


@dataclass(frozen=True)
class Reads:
    """One reading of a data set, as the task asks for it."""

    dataset: str  # its folder below that of all data sets: the Hub id
    subset: str | None = None
    splits: tuple[str, ...] = ()  # that the task uses
    arguments: tuple[tuple[str, Any], ...] = ()  # further arguments of `load_dataset`
    columns: tuple[str, ...] = ()  # that every row must have


@dataclass(frozen=True)
class Needs:
    """The needs of a task."""

    task: str
    reads: tuple[Reads, ...] = ()
    files: dict[str, str] = field(default_factory=dict)  # path below the data sets -> url
    nltk: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()  # that are not installed
    tokenizer: bool = False  # whether it writes its prompts with the model's tokenizer
    runs_code: bool = False  # whether it runs code that the model writes
    classified: bool = False  # whether it asks a web service about each answer; a classifier can instead
    zero_shot: bool = False  # whether the harness ignores few_shot: the task file states 0
    refusal: str = ""  # why it cannot be run here

    @property
    def datasets(self) -> list[str]:
        """The folders that the task needs below that of all data sets, sorted."""
        folders = {data.dataset for data in self.reads} | {folder_of(url) for url in self.files.values()}
        return sorted(folders | ({NLTK} if self.nltk else set()))


def needs_of(task: Task) -> Needs:
    """The needs of one task."""
    config = task.config
    code = code_needs(config)
    reads = [Reads(name, subset, (split,) if split else ()) for name, subset, split in code.datasets]
    metrics = {*code.hub_metrics, *_hub_metrics(config)}
    refusal = ""
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        refusal = "it asks about images or sound, and the models read text"
    elif code.services and not is_classified(config):
        refusal = f"it asks a web service ({', '.join(code.services)}), and nothing here uses one"
    elif runs_code(config) and metrics != {CODE_EVAL}:
        refusal = "it may run code of the model outside the sandbox"
    elif not runs_code(config) and metrics:
        refusal = f"it runs code of the Hub to compute {', '.join(sorted(metrics))}, and no code is fetched"
    return Needs(
        task=task.name,
        reads=(*_own_data(config), *reads),
        files={placed(url): url for url in code.urls},
        nltk=code.nltk,
        packages=tuple(name for name in code.packages if not is_importable(name)),
        tokenizer=isinstance(config.get("custom_dataset"), Function),
        runs_code=runs_code(config),
        classified=is_classified(config),
        zero_shot=config.get("num_fewshot") == 0,
        refusal=refusal,
    )


def runs_code(config: Config) -> bool:
    """Whether a task runs code that the model writes."""
    return config.get("unsafe_code", False) is not False


def is_classified(config: Config) -> bool:
    """Whether a task asks a web service about each answer, which a local classifier can do instead."""
    judge = config.get("process_results")
    return isinstance(judge, Function) and judge.name in CLASSIFIED


def is_importable(module: str) -> bool:
    """Whether a top-level module is there."""
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _own_data(config: Config) -> Iterator[Reads]:
    """Yields the data set that the task file names."""
    path, name = config.get("dataset_path"), config.get("dataset_name")
    if isinstance(config.get("custom_dataset"), Function) or not path or not isinstance(path, str):
        return  # its code says what it reads
    arguments = {
        key: value for key, value in (config.get("dataset_kwargs") or {}).items() if key not in NOT_DATA
    }
    if path in PACKAGED:
        for url in _texts(arguments.get("data_files")):
            if url.startswith(HUB):
                yield Reads(folder_of(url), arguments=(("file", placed(url)),))
        return
    splits, columns = _splits(config), _columns(config)
    yield Reads(path, str(name) if name else None, splits, tuple(sorted(arguments.items())), columns)


def _splits(config: Config) -> tuple[str, ...]:
    """The splits that questions come from, and that few-shot examples come from."""
    asked = config.get("test_split") or config.get("validation_split")
    shots = config.get("fewshot_config") or {}
    shots = shots if isinstance(shots, dict) else {}
    examples = None
    if not shots.get("samples"):
        shown = config.get("fewshot_split") or shots.get("split")
        examples = shown or config.get("training_split") or config.get("validation_split")
    return tuple(dict.fromkeys(str(split) for split in (asked, examples) if split))


def _columns(config: Config) -> tuple[str, ...]:
    """The columns that the templates of a task name; none if code changes the rows first."""
    if config.get("process_docs") or config.get("class"):
        return ()
    templates = [config.get(key) for key in ("doc_to_text", "doc_to_target", "doc_to_choice")]
    return tuple(
        dict.fromkeys(chain.from_iterable(_named(text) for text in templates if isinstance(text, str)))
    )


@cache
def _named(template: str) -> list[str]:
    """The columns that a template needs. A template that asks whether a column is defined needs none."""
    if "{" not in template or " defined" in template:
        return []
    from jinja2 import Environment, TemplateSyntaxError, meta

    try:
        return sorted(meta.find_undeclared_variables(Environment().parse(template)))
    except TemplateSyntaxError:
        return []  # the harness reports it


def _hub_metrics(config: Config) -> Iterator[str]:
    for metric in config.get("metric_list") or []:
        if isinstance(metric, dict) and metric.get("hf_evaluate") is True:
            yield str(metric.get("metric"))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def placed(url: str) -> str:
    """The path of a web file below the data sets: for a file of the Hub, in the folder of its data set; for
    others, under their host.

    `https://huggingface.co/datasets/a/b/resolve/main/x.json` -> `a/b/x.json`;
    `https://example.org/x/y.json` -> `example.org/x/y.json`.
    """
    for prefix in HUB:
        if url.startswith(prefix):
            owner, name, *rest = url.removeprefix(prefix).split("/")
            if prefix.startswith("https") and rest[:1] in (["resolve"], ["raw"], ["blob"]):
                rest = rest[2:]
            return "/".join([owner, name.split("@")[0], *rest])
    parts = urlsplit(url)
    return f"{parts.netloc}{parts.path}"


def folder_of(url: str) -> str:
    """The folder of a web file below the data sets: the id of its data set, or its host."""
    return "/".join(placed(url).split("/")[: 2 if url.startswith(HUB) else 1])


def fetch_command(dataset: str, needs: Iterable[Needs], datasets: str) -> str:
    """The commands that fetch a folder below `datasets`, on a machine with a network."""
    folder = f"{datasets.rstrip('/')}/{dataset}"
    if dataset == NLTK:
        names = sorted({name for need in needs for name in need.nltk})
        return f"python -m nltk.downloader -d {folder} {' '.join(names)}"
    urls = {path: url for need in needs for path, url in need.files.items() if folder_of(url) == dataset}
    if urls and not any(url.startswith(HUB) for url in urls.values()):
        return "\n".join(
            f"curl -L --create-dirs -o {datasets.rstrip('/')}/{path} {url}"
            for path, url in sorted(urls.items())
        )
    return f"hf download --repo-type dataset {dataset} --local-dir {folder}"
