"""The output of `apertus diff`."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from flows.format import is_number
from flows.provenance.diff import Difference, Side
from flows.provenance.moved_scores import MovedScores
from flows.terminal import empty_table
from specs.differences import Change


def show(console: Console, a: Side, b: Side, differences: list[Difference]) -> None:
    """Prints the parts of one side, and a table of what differs for parts that differ in the same way."""
    console.print(f"[bold]A[/] {escape(a.label)}    [bold]B[/] {escape(b.label)}", soft_wrap=True)
    alone = len(differences) == 1
    by_verdict: dict[str, list[str]] = {}
    alike: dict[str, list[Difference]] = {}  # parts that both sides have, by what differs
    for part in differences:
        by_verdict.setdefault(part.verdict, []).append(part.name)
        if not part.verdict.startswith("only in") and (part.verdict != "same" or alone):
            alike.setdefault(part.differing, []).append(part)
    if not alone and (same := by_verdict.get("same")):
        console.print(f"[green]same[/] {len(same)} of {len(differences)} parts: {escape(', '.join(same))}")
    for verdict in ("only in A", "only in B"):
        if not alone and (only := by_verdict.get(verdict)):
            console.print(f"[yellow]{verdict}[/] {escape(', '.join(only))}")
    if by_verdict.keys() <= {"same"} and not alike:
        console.print("nothing differs")
    for parts in alike.values():
        _show_parts(console, parts)
    _show_published(console, differences)


def _show_published(console: Console, differences: list[Difference]) -> None:
    headings = ("part", "", "metric", "ours", "published", "ours - published", "standard error", "source")
    table = empty_table("published scores", headings, numbers=headings[3:6], folded=headings)
    for part in differences:
        for sides, score in part.published:
            gap = "[dim]-[/]" if score.difference is None else f"{score.difference:+.4g}"
            error = "[dim]-[/]" if score.stderr is None else f"{score.stderr:.3g}, {score.stderr_of}"
            values = _shown(score.ours), _shown(score.published), gap, error, escape(score.source)
            table.add_row(escape(part.name), sides, escape(score.metric), *values)
    if table.row_count:
        console.print(table)


def _show_parts(console: Console, parts: list[Difference]) -> None:
    first = parts[0]
    assert first.a is not None and first.b is not None
    outcome = {
        "same": "[green]same fingerprint[/], run in the same way",
        "execution": "[green]same fingerprint[/]: the same result, run in another way",
        "differs": "[red]differs[/]",
    }[first.verdict]
    if len(parts) > 1:
        names = escape(", ".join(part.name for part in parts))
        console.print(f"\n[bold]{len(parts)} parts[/] {outcome}: {names}")
    else:
        fingerprints = " ".join(dict.fromkeys((first.a.fingerprint[:8], first.b.fingerprint[:8])))
        console.print(f"\n[bold]{escape(first.name)}[/] [dim]{fingerprints}[/] {outcome}", soft_wrap=True)
    headings = ("", "", "A", "B", "B - A")
    table = empty_table("", headings, numbers=("B - A",), folded=headings)
    changed: dict[str, list[Change[Any]]] = {
        "[bold]identity[/]": first.identity,
        "[dim]execution[/]": first.execution,
        "[bold]input[/]": [*first.inputs],
        "[cyan]metric[/]": [*first.metrics],
        "[cyan]at tokens[/]": [
            Change(f"{loss.tokens:,} {loss.name}", loss.a, loss.b) for loss in first.losses
        ],
    }
    for role, changes in changed.items():
        for name, a, b in ((change.name, change.a, change.b) for change in changes):
            table.add_row(role, escape(name), _shown(a), _shown(b), _gap(a, b))
    if table.row_count:
        console.print(table)
    if first.scores is not None:
        _show_scores(console, first.scores)


def _show_scores(console: Console, scores: MovedScores) -> None:
    """Prints the clauses that differ, the number of scores that move, and the scores that move most."""
    for clause in scores.clauses:
        for side, text in (("A", clause.a), ("B", clause.b)):
            if text is not None:
                console.print(f"clause {clause.name} in {side}: {escape(text)}", soft_wrap=True)
    moved = f"{scores.moved:,} of {scores.completions:,} scores move, by {scores.mean:+.4g} in the mean"
    swapped = f"{scores.swapped:,} of {scores.pairs:,} pairs of completions change their order"
    console.print(f"{moved}; {swapped}", soft_wrap=True)
    headings = ("prompt", "completion", "A", "B", "B - A")
    table = empty_table("the scores that move most", headings, numbers=headings[2:], folded=headings[:1])
    for score in scores.largest:
        values = _shown(score.a), _shown(score.b), _gap(score.a, score.b)
        table.add_row(escape(score.about), score.completion, *values)
    if scores.largest:
        console.print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "[dim]-[/]"
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))


def _gap(a: Any, b: Any) -> str:
    return f"{b - a:+.4g}" if is_number(a) and is_number(b) and a != b else ""
