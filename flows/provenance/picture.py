"""The picture of a lineage: an SVG file of boxes in layers, from the source files to what was asked for.

Invariants: the file is complete, holds no script and loads nothing; all text in it is escaped. The same
lineage gives the same bytes.
"""

from __future__ import annotations

from html import escape

from flows.format import amount, headline
from flows.graph_layout import HEIGHT, WIDTH, Box, draw
from flows.provenance.lineage import Item, Lineage, source_rows, summary_lines
from specs.errors import counted
from specs.stages import CHECKPOINTS

FITS, FITS_BOLD = 28, 22  # characters in a line of a box
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
TOP = 56  # for the title, in pixels
COLOURS = {  # fill, border
    "documents": ("#fff7e6", "#c98a1b"),
    "data": ("#eef6ee", "#4d8f58"),
    "training": ("#eaf1fb", "#3a6db5"),
    "result": ("#f5eefb", "#7a4fb0"),
}
MODELS = (*CHECKPOINTS, "reward_model", "import_model", "model_folder")
RESULTS = ("evaluate", "evaluate_reward", "evaluate_tokenizers", "probe", "export", "harness")


def svg(found: Lineage, title: str) -> str:
    """A lineage as SVG text."""
    reads: dict[str, list[str]] = {key: [] for key in found.documents}
    reads |= {
        key: list(dict.fromkeys(link.key for link in item.inputs.values()))
        for key, item in found.items.items()
    }
    drawing = draw(reads, {})
    width, height = max(drawing.width, 560), drawing.height + TOP + 34
    lines = [
        (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' viewBox='0 0"
            f" {width:.0f} {height:.0f}' {FONT}>"
        ),
        (
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='2' refY='4' markerWidth='7' markerHeight='7'"
            " orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='#7b8794'/></marker></defs>"
        ),
        f"<rect width='{width:.0f}' height='{height:.0f}' fill='#ffffff'/>",
        f"<text x='10' y='24' font-size='17' font-weight='600' fill='#1f2933'>{escape(title)}</text>",
        f"<text x='10' y='43' font-size='12' fill='#52606d'>{escape(_summary(found))}</text>",
        f"<g transform='translate(0 {TOP})'>",
    ]
    for arrow in drawing.arrows:
        lines.append(
            f"<path d='{arrow.path}' fill='none' stroke='#7b8794' stroke-width='1.4' marker-end='url(#tip)'/>"
        )
    lines += [_box(found, box) for box in drawing.boxes]
    lines += ["</g>", _legend(height - 14), "</svg>"]
    return "\n".join(lines) + "\n"


def _summary(found: Lineage) -> str:
    rows = source_rows(found)
    licences = sorted({row["license"] or "not stated" for row in rows})
    files = sum({row["digest"]: row["files"] for row in rows}.values())
    sources = counted(len(rows), "source") + (f" of {counted(files, 'file')}" if files else "")
    trained = sum(found.trained_on().values())
    return f"{sources}; licences: {', '.join(licences) or 'none'}" + (
        f"; {amount(trained)} tokens trained on" if trained else ""
    )


def _box(found: Lineage, box: Box) -> str:
    item = found.items.get(box.stage)
    if item is None:
        documents = found.documents[box.stage]
        facts = documents.facts
        licence = f"licence: {facts.get('license') or 'not stated'}"
        size = (
            f"{counted(documents.files, 'file')}, {amount(documents.bytes)}B"
            if documents.files
            else str(facts.get("language") or "")
        )
        group, texts = "documents", [documents.name, licence, size, f"sha-256 {documents.digest[:16]}"]
    else:
        group = "result" if item.kind in RESULTS else "training" if item.kind in MODELS else "data"
        at = f", step {item.key.rpartition('@')[2]}" if "@" in item.key else ""
        texts = [
            item.name,
            f"{item.kind}{at}",
            _numbers(found, item),
            f"{item.fingerprint[:16]} {item.action}",
        ]
    fill, border = COLOURS[group]
    dashed = " stroke-dasharray='5 3'" if item is not None and item.action in ("run", "gone") else ""
    shape = (
        f"<rect width='{WIDTH}' height='{HEIGHT}' rx='7' fill='{fill}' stroke='{border}'"
        f" stroke-width='1.3'{dashed}/>"
    )
    parts = [
        f"<g transform='translate({box.x:.1f} {box.y:.1f})'><title>{escape(chr(10).join(texts))}</title>",
        shape,
    ]
    for index, text in enumerate(texts):
        style = (
            "font-size='13' font-weight='600' fill='#1f2933'"
            if index == 0
            else "font-size='11' fill='#3e4c59'"
        )
        parts.append(
            f"<text x='10' y='{21 + 18 * index}'"
            f" {style}>{escape(_short(text, FITS if index else FITS_BOLD))}</text>"
        )
    return "".join([*parts, "</g>"])


def _numbers(found: Lineage, item: Item) -> str:
    train = item.metrics.get("train")
    if isinstance(train, dict):
        unit = "conversations" if "conversations" in train else "documents"
        return f"{amount(train.get(unit, 0))} {unit}, {amount(train.get('tokens', 0))} tokens"
    if item.kind == "mixture":
        return next(iter(summary_lines(found, item)), "")
    if item.steps:
        return f"{counted(item.steps, 'step')}, {amount(item.tokens)} tokens"
    return headline(item.metrics)


def _short(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _legend(y: float) -> str:
    parts, x = [], 10
    for name, (fill, border) in COLOURS.items():
        parts.append(
            f"<rect x='{x}' y='{y - 9:.0f}' width='12' height='12' rx='2' fill='{fill}' stroke='{border}'/>"
        )
        parts.append(f"<text x='{x + 17}' y='{y + 1:.0f}' font-size='11' fill='#3e4c59'>{name}</text>")
        x += 30 + 7 * len(name)
    return "".join(parts)
