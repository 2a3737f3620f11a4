"""The picture of a lineage: an SVG file of boxes in layers, from the source files to what was asked for.

Invariants: the file is complete, holds no script and loads nothing; all text in it is escaped. The same
lineage gives the same bytes.
"""

from __future__ import annotations

from html import escape

from flows.format import amount, headline
from flows.graph_layout import HEIGHT, WIDTH, Box, draw
from flows.provenance.lineage import Lineage, Member
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


def svg(lineage: Lineage, title: str) -> str:
    reads: dict[str, list[str]] = {key: [] for key in lineage.sources}
    reads |= {key: list(dict.fromkeys(member.sources.values())) for key, member in lineage.parts.items()}
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
        f"<text x='10' y='43' font-size='12' fill='#52606d'>{escape(_summary(lineage))}</text>",
        f"<g transform='translate(0 {TOP})'>",
    ]
    for arrow in drawing.arrows:
        lines.append(
            f"<path d='{arrow.path}' fill='none' stroke='#7b8794' stroke-width='1.4' marker-end='url(#tip)'/>"
        )
    lines += [_box(lineage, box) for box in drawing.boxes]
    lines += ["</g>", _legend(height - 14), "</svg>"]
    return "\n".join(lines) + "\n"


def _summary(lineage: Lineage) -> str:
    sources = lineage.sources.values()
    licences = sorted({source.license or "not stated" for source in sources})
    files = sum({source.digest: source.files for source in sources}.values())
    names = counted(len(sources), "source") + (f" of {counted(files, 'file')}" if files else "")
    trained = sum(lineage.trained_on().values())
    return f"{names}; licences: {', '.join(licences) or 'none'}" + (
        f"; {amount(trained)} tokens trained on" if trained else ""
    )


def _box(lineage: Lineage, box: Box) -> str:
    member = lineage.parts.get(box.stage)
    if member is None:
        source = lineage.sources[box.stage]
        size = f"{counted(source.files, 'file')}, {amount(source.bytes)}B"
        facts = size if source.files else source.language
        licence = f"licence: {source.license or 'not stated'}"
        group, texts = "documents", [source.name, licence, facts, f"sha-256 {source.digest[:16]}"]
    else:
        part = member.part
        group = "result" if part.kind in RESULTS else "training" if part.kind in MODELS else "data"
        at = f", step {member.key.rpartition('@')[2]}" if "@" in member.key else ""
        state = f"{part.fingerprint[:16]} {member.action}"
        texts = [part.name, f"{part.kind}{at}", _numbers(lineage, member), state]
    fill, border = COLOURS[group]
    dashed = " stroke-dasharray='5 3'" if member is not None and member.action in ("run", "gone") else ""
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


def _numbers(lineage: Lineage, member: Member) -> str:
    if train := member.data:
        unit = "conversations" if "conversations" in train else "documents"
        return f"{amount(train.get(unit, 0))} {unit}, {amount(train.get('tokens', 0))} tokens"
    if member.part.kind == "mixture":
        return next(iter(lineage.summary_lines(member)), "")
    if member.steps:
        return f"{counted(member.steps, 'step')}, {amount(member.tokens)} tokens"
    return headline(member.part.results)


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
