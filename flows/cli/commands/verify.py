"""`apertus verify`: finds damaged files in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from flows.cli.app import JsonOption, SetOption, StoreOption, app, console, errors, print_json
from flows.terminal import bytes_progress
from specs.errors import SpecError, some_of

if TYPE_CHECKING:
    from infra.store import Store
    from infra.store.maintenance.verify import Verified


@app.command("verify")
def verify_command(
    spec: Annotated[str | None, typer.Argument(metavar="[SPEC]", help="check the artifacts of SPEC")] = None,
    everything: Annotated[bool, typer.Option("--all", help="check the whole store")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="withdraw what is damaged, to be made again")] = False,
    store: StoreOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read everything that is stored and compare it with its digests. Ends with 1 when something is damaged,
    or has no checksum."""
    from flows.planning.parts import build
    from infra.store import Store, StoreError
    from infra.store.maintenance.verify import verify, withdraw
    from specs.pipeline import DEFAULT_STORE
    from specs.recipe import load

    if (spec is None) == (not everything):
        choose = "name a SPEC, or give --all and --store"
        raise SpecError.of((), "verify checks either a recipe or a whole store", choose)
    chosen = None
    if spec is None:
        opened = Store.open(store or DEFAULT_STORE)
    else:
        pipeline = load(spec, overrides or [])
        opened = Store.open(store or pipeline.store)
        try:
            graph = build(pipeline, opened, lambda name, listing: None)
            chosen = {node.path for node in graph.nodes.values() if opened.names(node.path)}
        except SpecError as error:
            raise pipeline.located(error) from None
        except StoreError as error:
            unresolved = "the recipe cannot be resolved, so the whole store is checked"
            errors.print(f"{unresolved}: {escape(str(error))}", soft_wrap=True)
    if opened.format() is None:
        raise StoreError(f"there is no store at '{opened.url}'")
    with bytes_progress(errors, "verifying", quiet=as_json) as progress:
        bar = progress.add_task("", total=None)
        verified = verify(
            opened, chosen, lambda done, total: progress.update(bar, completed=done, total=total)
        )
    withdrawn = withdraw(opened, verified.damages) if fix else []
    if as_json:
        print_json(to_json(opened, verified, withdrawn))
    else:
        show(console, opened, verified, withdrawn)
    if verified.damages or verified.without_checksum:
        raise typer.Exit(1)


def to_json(store: Store, verified: Verified, withdrawn: list[str]) -> dict[str, object]:
    damaged = [
        {
            "stage": verified.names.get(damage.artifact, damage.artifact),
            "artifact": damage.artifact,
            "markers": list(damage.markers),
            "file": damage.file or None,
            "pieces": list(damage.pieces),
            "what": damage.what,
        }
        for damage in verified.damages
    ]
    rerun = verified.rerun()
    return {
        "store": store.url,
        "markers": verified.markers,
        "files": verified.files,
        "bytes": verified.bytes,
        "damaged": damaged,
        "rerun": [part for part in rerun if part["because"] == "damaged"],
        "kept": [part for part in rerun if part["because"] != "damaged"],
        "withdrawn": withdrawn,
        "without_checksum": verified.without_checksum,
    }


def show(console: Console, store: Store, verified: Verified, withdrawn: list[str]) -> None:
    mebibytes = f"{verified.bytes / 2**20:,.1f} MiB"
    amount = f"{verified.markers} markers and {verified.files} files of {mebibytes} in {store.url}"
    if verified.without_checksum:
        documents = escape(some_of(verified.without_checksum))
        fix = "their writers can add it (docs/data_formats.md)"
        console.print(f"no checksum: {documents}; {fix}", soft_wrap=True)
    if not verified.damages:
        console.print(f"{escape(amount)} are what was committed.", soft_wrap=True)
        return
    for damage in verified.damages:
        stage = verified.names.get(damage.artifact, damage.artifact)
        console.print(f"[red]damaged:[/] {escape(stage)}: {escape(damage.what)}", soft_wrap=True)
    for part in verified.rerun():
        # a part made from a damaged one is kept: it compared what it read with its digests
        what = "to rerun" if part["because"] == "damaged" else "kept"
        console.print(f"{what}: {escape(part['name'])} ({escape(part['because'])})", soft_wrap=True)
    for path in withdrawn:
        console.print(f"withdrawn: {escape(path)}", soft_wrap=True)
    end = "." if withdrawn else "; --fix withdraws them."
    console.print(f"{len(verified.damages)} of {escape(amount)} are damaged{end}", soft_wrap=True)
