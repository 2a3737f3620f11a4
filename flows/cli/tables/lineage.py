"""The output of `apertus lineage`: a tree of parts, the sources, and what was planted on purpose."""

from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from flows.format import COLOURS, amount
from flows.provenance.lineage import Lineage, Member, key_of
from flows.stored_part import SourceFiles
from flows.terminal import empty_table
from specs.errors import counted


def tree(lineage: Lineage, root: str) -> Tree:
    """The tree of a part. A repeated part is only named, and a repeated tokenizer left out."""
    shown = {root}

    def grow(member: Member, branch: Tree) -> Tree:
        for role, input_ in member.part.inputs.items():
            key = key_of(input_)
            at = f"@step={input_.step}" if input_.step is not None else ""
            if key in lineage.sources:
                branch.add(_source_label(role, lineage.sources[key]))
            elif key in shown and role == "tokenizer":
                continue
            elif key in shown:
                branch.add(f"[dim]{role}:[/] {escape(lineage.parts[key].part.name)}{at} [dim](above)[/]")
            else:
                shown.add(key)
                other = lineage.parts[key]
                grow(other, branch.add(f"[dim]{role}:[/] {_label(lineage, other, at)}"))
        return branch

    member = lineage.parts[root]
    return grow(member, Tree(_label(lineage, member, "")))


def _label(lineage: Lineage, member: Member, at: str) -> str:
    part = member.part
    line = f"[bold]{escape(part.name)}[/]{at} [dim]{part.fingerprint[:8]}[/] {part.kind}"
    line += f", [{COLOURS[member.action]}]{member.action}[/]"
    line += f", {counted(member.steps, 'step')}, {amount(member.tokens)} tokens" if member.steps else ""
    return "\n".join([line, *(f"[dim]{escape(line)}[/]" for line in lineage.summary_lines(member))])


def _source_label(role: str, source: SourceFiles) -> str:
    known = [str(source.facts[name]) for name in SourceFiles.SHOWN if source.facts.get(name)]
    size = f", {counted(source.files, 'file')}, {amount(source.bytes)}B" if source.files else ""
    facts = escape(", ".join(known) or source.name)
    return f"[dim]{role}:[/] {escape(source.name)} [dim]{source.digest[:8]}[/] {facts}{size}"


def sources_table(lineage: Lineage) -> Table:
    """A table of every source with its licence, its language and its tokens that were trained on."""
    counted = ("files", "size", "tokens held", "tokens trained on")
    headings = ("source", "licence", "language", *counted[:2], "used for", *counted[2:], "digest")
    table = empty_table("sources", headings, numbers=counted, folded=headings)
    for use in lineage.source_uses():
        source = use.source
        named = (source.name, source.license or "not stated", source.language or "not stated")
        files = str(source.files or "-"), f"{amount(source.bytes)}B" if source.bytes else "-"
        tokens = amount(use.tokens_held), amount(use.tokens_trained_on)
        used_for, digest = escape(", ".join(use.used_for)), f"[dim]{source.digest[:12]}[/]"
        table.add_row(*map(escape, named), *files, used_for, *tokens, digest)
    return table


def planted_table(lineage: Lineage) -> Table | None:
    """A table of the documents put into the training data on purpose; None if there are no such documents."""
    rows = {
        (member.part.path, record.name): (member.part.name, record)
        for member in lineage.parts.values()
        for record in member.planted
    }
    if not rows:
        return None
    headings = ("planted documents", "in", "copies of each", "documents", "copies", "tokens", "digest")
    table = empty_table("planted on purpose", headings, numbers=headings[3:6], folded=headings)
    for name, record in rows.values():
        counts = (record.documents, record.copies, record.tokens)
        table.add_row(
            *(escape(record.name), escape(name), ", ".join(map(str, record.buckets))),
            *("-" if count is None else f"{count:,}" for count in counts),
            f"[dim]{record.digest[:12]}[/]",
        )
    return table
