"""The base of all commands: the app, its consoles and options, and the conversion of errors into messages."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from flows.format import amount
from flows.terminal import make_console
from infra.imports import quick_imports
from specs.errors import SpecError, StageError, counted
from specs.redaction import redacted

if TYPE_CHECKING:
    from flows.planning.plan import Plan
    from infra.store.inputs import Listing


class Commands(TyperGroup):
    """All commands, in the order of work; converts an error of any command into a message."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if hasattr(error, "exit_code"):  # the command-line library prints its errors itself
                raise
            if ctx.params["debug"]:
                errors.print(escape(redacted(traceback.format_exc())), soft_wrap=True)
            for message in map(_with_variables, _messages(error)):
                errors.print(f"[red]error:[/] {escape(redacted(message))}", soft_wrap=True)
            raise typer.Exit(2 if _is_mistake(error) else 1) from None


ORDER = [
    *("init", "plan", "rehearse", "run", "deploy"),
    *("status", "logs", "inspect", "metrics", "report"),
    *("branch", "diff", "lineage"),
    *("runs", "forget", "gc", "cp", "verify", "schema"),
]


app = typer.Typer(
    name="apertus",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="From raw text to a trained, exported model.",
)
NO_TERMINAL = 200  # columns of output to a file or a pipe, where nothing may be cut
console = make_console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else NO_TERMINAL)
errors = make_console(stderr=True)

SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help="the YAML file of the pipeline")]
StoreOption = Annotated[
    str | None, typer.Option("--store", envvar="APERTUS_STORE", help="URL of the store; wins over the spec's")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="overrides a field, e.g. stages.cooldown.optimizer.lr=2e-4"
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        envvar="APERTUS_PROFILE",
        metavar="FILE",
        help="profile of the cluster that runs the stages; this machine by default",
    ),
]
DebugOption = Annotated[
    bool, typer.Option("--debug", envvar="APERTUS_DEBUG", help="print the traceback of an error, too")
]
VARIABLES = ("APERTUS_PROFILE", "APERTUS_STORE", "APERTUS_SCRATCH", "APERTUS_CACHE")
LONGEST = 500  # characters of an unexpected error
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        console.print(f"apertus {version('apertus')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: DebugOption = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Declares the options of the app, which `Commands` reads. OSError for a user without a home folder."""
    if os.path.expanduser("~") == "~":
        problem = f"user {os.getuid()} has no home folder: HOME is not set, and passwd has no such user"
        raise OSError(f"{problem}. Fix: set HOME to a folder that the user can write")


def _with_variables(message: str) -> str:
    """The message, with the variables of the environment whose values it names."""
    named = [
        name
        for name in VARIABLES
        if (value := os.environ.get(name, "").removeprefix("file://").rstrip("/"))
        and re.search(rf"(?:^|'){re.escape(value)}[:/']", message)
    ]
    return f"{message} ({' and '.join(named)} names it)" if named else message


def _is_mistake(error: Exception) -> bool:
    """Whether the user can mend it."""
    from infra.store import StoreError

    return isinstance(error, (SpecError, StoreError, StageError, OSError))


def _messages(error: Exception) -> list[str]:
    from specs.foreign import trail

    if isinstance(error, SpecError):
        return [str(problem) for problem in error.problems]
    if isinstance(error, OSError) and error.filename:
        return [f"{error.filename}: {error.strerror}"]
    if _is_mistake(error):
        return [str(error)]
    what = f"{type(error).__name__}: {error}"[:LONGEST]
    last = None if isinstance(error, ImportError) or not trail else trail[-1]
    hint = "" if last is None else f"; the file that was read last is {last}"
    return [f"unexpected {what}{hint}. `apertus --debug` before the same command prints the traceback"]


def make_plan(spec: str, store: str | None, overrides: list[str] | None, ask_network: bool = True) -> Plan:
    if "flows.planning.plan" not in sys.modules:  # a command may plan several times
        with quick_imports():
            importlib.import_module("flows.planning.plan")
    from flows.inspection.sources import check_sources
    from flows.planning.plan import make
    from infra.store import Store
    from specs.recipe import load

    pipeline = load(spec, overrides or [])
    opened = Store.open(store or pipeline.store)

    def reading(name: str, listing: Listing) -> None:
        if listing.bytes > 2**28:
            files = f"{counted(len(listing.files), 'file')}, {amount(listing.bytes)}B"
            errors.print(f"reading source {name} for its digest: {files}")

    plan = make(pipeline, opened, reading, ask_network=ask_network)
    check_sources(plan)
    return plan


def print_json(document: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
