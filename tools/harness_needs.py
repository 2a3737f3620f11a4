"""Makes the table of what the code of the harness's tasks needs, by reading that code and not by running it:

    python -m tools.harness_needs > apertus_model/evaluation/harness/code_needs.json

Task files of the harness name functions of Python files beside them (`!function utils.process_docs`). Some of
these read data sets, fetch files, need further packages or ask a service, which the task file does not
mention. Code counts when it can be reached from the named functions, through names and through imports of
other modules of the harness.

Invariants: nothing is imported or executed, and the table depends on nothing but the installed harness.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from apertus_model.evaluation.harness.needs import CodeNeeds, CodeTable, key_of
from apertus_model.evaluation.harness.tasks import Function, installed_folder, installed_version

WEB = ("requests", "httpx", "urllib.request", "openai", "anthropic", "googleapiclient", "aiohttp")
OURS = "lm_eval.tasks."
FUNCTION = re.compile(r"!function[ \t]+[\"']?([\w.]+)")
NOT_TASKS = {".py", ".pyc", ".md", ".png", ".jpg"}
WITH_HARNESS = {
    *("absl", "datasets", "evaluate", "huggingface_hub", "lm_eval", "nltk", "numpy", "packaging", "pandas"),
    *(
        "regex",
        "requests",
        "rouge_score",
        "sacrebleu",
        "scipy",
        "sklearn",
        "sympy",
        "torch",
        "tqdm",
        "transformers",
    ),
    *("word2number", "yaml"),
}
"""Modules of the packages that this program or the harness requires, or that those require."""
Needed = dict[str, set[Any]]  # by field of `CodeNeeds`


def table() -> CodeTable:
    """What each function needs that a task file of the harness names, without those that need nothing."""
    functions = {}
    for file in sorted(installed_folder().rglob("*")):
        if not file.is_file() or file.suffix in NOT_TASKS:
            continue
        for name in FUNCTION.findall(file.read_text("utf-8", errors="replace")):
            function = Function(name, file.parent)
            if (needs := code_needs([function])) != CodeNeeds():
                functions[key_of(function)] = needs
    return CodeTable(harness=str(installed_version()), functions=dict(sorted(functions.items())))


def page() -> str:
    """The table as JSON, with a line for each function."""
    needs_of_code = table()
    lines = [
        f"  {json.dumps(key)}: {needs.model_dump_json(exclude_defaults=True)}"
        for key, needs in needs_of_code.functions.items()
    ]
    return f'{{\n "harness": "{needs_of_code.harness}",\n "functions": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def code_needs(functions: Iterable[Function]) -> CodeNeeds:
    """What the code needs that the functions reach. A function of an installed package is not read."""
    needed: Needed = defaultdict(set)
    seen: set[tuple[Path, str]] = set()
    waiting = [
        (path, function.name.rpartition(".")[2])
        for function in functions
        if (path := _module_of(function)) is not None
    ]
    while waiting:
        path, name = waiting.pop()
        if (path, name) in seen:
            continue
        seen.add((path, name))
        module = _module(path)
        if (path, "") not in seen:
            waiting.append((path, ""))
        own, names = _definition(path, name)
        for kind, values in own.items():
            needed[kind] |= values
        waiting += [(path, used) for used in names if used in module.named]
        waiting += [module.imported[used] for used in names if used in module.imported]
    return CodeNeeds(**{kind: tuple(sorted(values, key=str)) for kind, values in needed.items()})


@cache
def _definition(path: Path, name: str) -> tuple[Needed, frozenset[str]]:
    """What one definition of a module needs by itself, and the names in it."""
    module = _module(path)
    needed: Needed = defaultdict(set)
    names: set[str] = set()
    for node in module.statements(name):
        names |= _read(node, module, needed)
    return needed, frozenset(names)


@dataclass
class _Module:
    """A Python file: what it defines, and what runs when it is imported."""

    path: Path
    named: dict[str, list[ast.stmt]]
    loaded: list[ast.stmt]
    imported: dict[str, tuple[Path, str]]  # names from other modules of the harness
    aliases: dict[str, str]  # local name -> dotted name of what was imported

    def statements(self, name: str) -> list[ast.stmt]:
        """The statements that define a name; for "" those that run on import, for "*" the whole module."""
        if name == "*":
            return [*self.loaded, *chain.from_iterable(self.named.values())]
        return self.loaded if name == "" else self.named.get(name, [])


@cache
def _module(path: Path) -> _Module:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return _Module(path, {}, [], {}, {})
    module = _Module(path, {}, [], {}, {})
    for statement in _flat(tree.body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            module.named.setdefault(statement.name, []).append(statement)
        else:
            module.loaded.append(statement)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                local = alias.asname or alias.name
                module.aliases[local] = f"{node.module}.{alias.name}"
                if (other := _harness_module(node.module, path)) is not None:
                    module.imported[local] = (other, alias.name)
                elif (other := _harness_module(f"{node.module}.{alias.name}", path)) is not None:
                    module.imported[local] = (other, "*")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                module.aliases[alias.asname or top] = alias.name if alias.asname else top
    return module


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of a module, with those inside `if` and `try`. Blocks for type checkers are left out."""
    flat: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If):
            if not (isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"):
                flat += _flat(statement.body) + _flat(statement.orelse)
        elif isinstance(statement, ast.Try):
            optional = any(
                not any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
                for handler in statement.handlers
            )
            kept = [
                inner
                for inner in _flat(statement.body)
                if not (optional and isinstance(inner, ast.Import | ast.ImportFrom))
            ]
            flat += kept + _flat(statement.orelse) + _flat(statement.finalbody)
        else:
            flat.append(statement)
    return flat


def _module_of(function: Function) -> Path | None:
    """The file of a function beside a task file; None for a function of an installed package."""
    module = function.name.rpartition(".")[0].replace(".", "/")
    path = (function.folder / f"{module}.py").resolve()
    return path if path.is_file() else None


def _harness_module(name: str, path: Path) -> Path | None:
    """The file of an imported module of the harness's tasks; None for other modules."""
    if name.startswith(OURS):
        file = installed_folder() / f"{name.removeprefix(OURS).replace('.', '/')}.py"
    else:
        file = path.parent / f"{name.replace('.', '/')}.py"
    return file if file.is_file() else None


def _read(statement: ast.stmt, module: _Module, needed: Needed) -> set[str]:
    """Adds the needs of one statement to `needed`. Returns the names in the statement."""
    fetches = False
    names: set[str] = set()
    texts: list[str] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            needed["packages"] |= _further((alias.name for alias in node.names), module.path)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            needed["packages"] |= _further([node.module], module.path)
        elif isinstance(node, ast.Call):
            called = _dotted(node.func, module)
            if called in ("datasets.load_dataset", "datasets.load.load_dataset"):
                _dataset(node, needed)
            elif called in ("requests.get", "httpx.get"):
                fetches = True
            elif called == "nltk.download" and (name := _constant(node, 0)):
                needed["nltk"].add(name)
            elif called == "evaluate.load":
                needed["hub_metrics"].add(_constant(node, 0) or "?")
            elif called.startswith(tuple(f"{name}." for name in WEB)):
                needed["services"].add(called.split(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.Name):
            names.add(node.id)
            if module.aliases.get(node.id, "").startswith(tuple(f"{name}." for name in WEB)):
                needed["services"].add(module.aliases[node.id].split(".")[0])
    urls = {text for text in texts if text.startswith(("https://", "http://")) and " " not in text}
    if fetches or (urls and "requests" in module.aliases and _default_urls(statement)):
        needed["urls"] |= urls
    return names


def _default_urls(statement: ast.stmt) -> bool:
    """Whether a function has a default argument that is a URL: it fetches that file."""
    return isinstance(statement, ast.FunctionDef) and any(
        isinstance(default, ast.Constant) and str(default.value).startswith("http")
        for default in statement.args.defaults
    )


def _dotted(node: ast.expr, module: _Module) -> str:
    """The dotted name of an expression after the imports of the module: `evaluate.load` for
    `hf_evaluate.load`."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    first = module.aliases.get(node.id, node.id if not parts else "")
    return ".".join([first, *reversed(parts)])


def _constant(call: ast.Call, index: int, keyword: str = "") -> str | None:
    named = [argument.value for argument in call.keywords if keyword and argument.arg == keyword]
    value = call.args[index] if index < len(call.args) else next(iter(named), None)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _dataset(call: ast.Call, needed: Needed) -> None:
    if (path := _constant(call, 0, "path")) is not None:
        needed["datasets"].add((path, _constant(call, 1, "name"), _constant(call, 99, "split")))


def _further(imported: Iterable[str], path: Path) -> set[str]:
    """The top-level modules that come with neither Python nor the harness, and are not beside `path`."""
    tops = {name.split(".")[0] for name in imported} - sys.stdlib_module_names - WITH_HARNESS
    return {top for top in tops if not (path.parent / f"{top}.py").exists()}


if __name__ == "__main__":
    print(page(), end="")
