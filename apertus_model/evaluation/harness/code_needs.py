"""Finds what the code of a task needs, by reading the code and not by running it.

Task files of the harness name functions of Python files beside them (`!function utils.process_docs`). Some of
these read data sets, fetch files, need further packages or ask a service, which the task file does not
mention. Code counts when it can be reached from the named functions, through names and through imports of
other modules of the harness.

Invariant: nothing is imported or executed.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

from apertus_model.evaluation.harness.tasks import Function, installed_folder

WEB = ("requests", "httpx", "urllib.request", "openai", "anthropic", "googleapiclient", "aiohttp")
OURS = "lm_eval.tasks."


@dataclass
class CodeNeeds:
    """The needs of reachable code."""

    packages: set[str] = field(default_factory=set)  # top-level modules that cannot be found
    datasets: set[tuple[str, str | None, str | None]] = field(default_factory=set)  # (id, subset, split)
    urls: set[str] = field(default_factory=set)  # of files that it fetches
    nltk: set[str] = field(default_factory=set)  # resources of NLTK that it downloads
    services: set[str] = field(default_factory=set)  # modules by which it uses the network in other ways
    hub_metrics: set[str] = field(default_factory=set)  # metrics whose code is on the hub


def code_needs(functions: Iterable[Function]) -> CodeNeeds:
    """The needs of the code that the functions reach. A function of an installed package is not read."""
    return _code_needs(frozenset(functions))


@cache
def _code_needs(functions: frozenset[Function]) -> CodeNeeds:
    needs = CodeNeeds()
    seen: set[tuple[Path, str]] = set()
    waiting = [
        (path, one.name.rpartition(".")[2]) for one in functions if (path := _module_of(one)) is not None
    ]
    while waiting:
        path, name = waiting.pop()
        if (path, name) in seen:
            continue
        seen.add((path, name))
        module = _module(path)
        if (path, "") not in seen:
            waiting.append((path, ""))
        own, names = _local(path, name)
        for group in fields(CodeNeeds):
            getattr(needs, group.name).update(getattr(own, group.name))
        waiting += [(path, used) for used in names if used in module.named]
        waiting += [module.imported[used] for used in names if used in module.imported]
    return needs


@cache
def _local(path: Path, name: str) -> tuple[CodeNeeds, frozenset[str]]:
    """The needs of one definition of a module by itself, and the names in it."""
    module, needs = _module(path), CodeNeeds()
    names: set[str] = set()
    for node in module.statements(name):
        names |= _read(node, module, needs)
    return needs, frozenset(names)


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
            return [*self.loaded, *(one for found in self.named.values() for one in found)]
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
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If):
            if not (isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"):
                found += _flat(statement.body) + _flat(statement.orelse)
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
            found += kept + _flat(statement.orelse) + _flat(statement.finalbody)
        else:
            found.append(statement)
    return found


def _module_of(function: Function) -> Path | None:
    """The file of a function beside a task file; None for a function of an installed package."""
    module = function.name.rpartition(".")[0].replace(".", "/")
    path = (function.folder / f"{module}.py").resolve()
    return path if path.is_file() else None


def _harness_module(name: str, path: Path) -> Path | None:
    """The file of an imported module of the harness's tasks; None for other modules."""
    if name.startswith(OURS):
        found = installed_folder() / f"{name.removeprefix(OURS).replace('.', '/')}.py"
        return found if found.is_file() else None
    beside = path.parent / f"{name.replace('.', '/')}.py"
    return beside if beside.is_file() else None


def _read(statement: ast.stmt, module: _Module, needs: CodeNeeds) -> set[str]:
    """Adds the needs of one statement to `needs`. Returns the names in the statement."""
    fetches = False
    names: set[str] = set()
    texts: list[str] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            needs.packages |= {name for alias in node.names if (name := _missing(alias.name, module.path))}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            needs.packages |= {name for name in [_missing(node.module, module.path)] if name}
        elif isinstance(node, ast.Call):
            called = _dotted(node.func, module)
            if called in ("datasets.load_dataset", "datasets.load.load_dataset"):
                _dataset(node, needs)
            elif called in ("requests.get", "httpx.get"):
                fetches = True
            elif called == "nltk.download" and (name := _constant(node, 0)):
                needs.nltk.add(name)
            elif called == "evaluate.load":
                needs.hub_metrics.add(_constant(node, 0) or "?")
            elif called.startswith(tuple(f"{name}." for name in WEB)):
                needs.services.add(called.split(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.Name):
            names.add(node.id)
            if module.aliases.get(node.id, "").startswith(tuple(f"{name}." for name in WEB)):
                needs.services.add(module.aliases[node.id].split(".")[0])
    urls = {text for text in texts if text.startswith(("https://", "http://")) and " " not in text}
    if fetches or (urls and "requests" in module.aliases and _default_urls(statement)):
        needs.urls |= urls
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
    stated = [one.value for one in call.keywords if keyword and one.arg == keyword]
    value = call.args[index] if index < len(call.args) else next(iter(stated), None)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _dataset(call: ast.Call, needs: CodeNeeds) -> None:
    if (path := _constant(call, 0, "path")) is not None:
        needs.datasets.add((path, _constant(call, 1, "name"), _constant(call, 99, "split")))


def _missing(name: str, path: Path) -> str | None:
    """The top-level module of an import if it cannot be found, else None."""
    top = name.split(".")[0]
    if top in sys.stdlib_module_names or top in sys.modules or (path.parent / f"{top}.py").exists():
        return None
    return None if importlib.util.find_spec(top) is not None else top
