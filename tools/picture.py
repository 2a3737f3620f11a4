"""Draws the pictures of the pages: the stages of a recipe with those that a change reruns, and the folders.

    python -m tools.picture        # writes docs/images/plan.svg and docs/images/folders.svg

Invariant: the first picture compares two plans of a checked-in recipe; the same code draws the same bytes.
"""

from __future__ import annotations

import re
import tempfile
from html import escape
from pathlib import Path

from flows.graph_layout import GAP_ALONG, HEIGHT, MARGIN, WIDTH, draw
from flows.planning.plan import Plan, make
from flows.report.content import collect
from infra.store import Store
from specs.recipe import load

ROOT = Path(__file__).parents[1]
RECIPE, CHANGE = "specs/recipes/mini.yaml", "stages.align.optimizer.lr=1.5e-4"
IMAGES = ROOT / "docs" / "images"
BOX_WIDTH, BOX_HEIGHT, LAYER = 172, 38, 62  # pixels; LAYER: from the top of one layer to that of the next
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
# Fill and border; the boxes carry their own background, so the picture reads alike on a light and a dark
# page.
COLOURS = {"reuse": ("#dcefdf", "#3f7d4b"), "run": ("#ffe3c2", "#c2660c")}
LINE = "#8592a0"
FOLDERS = {  # from left to right: the purpose of each, and its work
    "recipe.yaml": ("one YAML file", "sources, stages"),
    "specs": ("what to run", "compose, check, resolve"),
    "flows": ("in which order", "fingerprint, plan, run"),
    "apertus_model": ("how it is computed", "data, training, results"),
    "infra/store": ("what is kept", "files, then a marker"),
}
LAUNCHERS = "infra/launchers"
BACK = {"apertus_model": "checked files", "flows": "what is stored"}  # arrows from the store


def plan() -> str:
    """The plan of a changed recipe as SVG text."""
    with tempfile.TemporaryDirectory() as folder:
        before = make(load(ROOT / RECIPE), Store.open(folder))
        after = make(load(ROOT / RECIPE, [CHANGE]), Store.open(folder))
    boxes = {box.name: box for box in collect(after).boxes}
    drawing = draw(
        {name: box.reads for name, box in boxes.items()}, {name: box.after for name, box in boxes.items()}
    )
    again = changed(before, after)
    height = _y(drawing.height) + 26
    lines = [_arrow(_path(arrow.path), dashed=arrow.waits) for arrow in drawing.arrows]
    for box in drawing.boxes:
        action = "run" if box.stage in again else "reuse"
        lines.append(_box(_x(box.x), _y(box.y), action, box.stage, f"{boxes[box.stage].kind} · {action}"))
    meanings = {"reuse": "reuse: stored, not computed again", "run": f"run: changed by --set {CHANGE}"}
    for index, (action, text) in enumerate(meanings.items()):
        fill, border = COLOURS[action]
        x, y = 8 + 250 * index, height - 18
        lines.append(
            f"<rect x='{x}' y='{y:.0f}' width='11' height='11' rx='2' fill='{fill}' stroke='{border}'/>"
        )
        lines.append(svg_text(x + 17, y + 10, text))
    return as_svg(_x(drawing.width) + 2, height, lines)


def folders() -> str:
    """The folders, and what passes from one to another, as SVG text."""
    gap, top, high = 40, 24, 2 * BOX_HEIGHT - 20
    left = {name: 4 + index * (BOX_WIDTH + gap) for index, name in enumerate(FOLDERS)}
    lines, store = [], left["infra/store"] + BOX_WIDTH / 2
    for x in [*left.values()][1:]:
        lines.append(_arrow(f"M {x - gap} {top + high / 2} L {x - 5} {top + high / 2}"))
    for depth, (name, text) in enumerate(BACK.items()):
        middle, start, down = left[name] + BOX_WIDTH / 2, store + 12 * depth, top + high + 26 + 26 * depth
        lines.append(_arrow(f"M {start} {top + high} V {down} H {middle} V {top + high + 5}", dashed=True))
        lines.append(svg_text(middle + 8, down - 6, text))
    for name, (purpose, work) in FOLDERS.items():
        lines.append(_box(left[name], top, "reuse" if "/" not in name else "run", name, purpose, work))
    lines.append(svg_text(left["flows"] + BOX_WIDTH - 24, top - 8, LAUNCHERS))
    return as_svg(left["infra/store"] + BOX_WIDTH + 4, top + high + 60, lines)


def changed(before: Plan, after: Plan) -> set[str]:
    """The stages of `after` with a part whose fingerprint `before` does not have."""
    known = {node.fingerprint for node in before.graph.nodes.values()}
    return {node.stage for node in after.graph.nodes.values() if node.fingerprint not in known}


def as_svg(width: float, height: float, lines: list[str]) -> str:
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' {FONT}>",
        (
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='3' refY='4' markerWidth='6' markerHeight='6' "
            f"orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='{LINE}'/></marker></defs>"
        ),
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def _arrow(path: str, *, dashed: bool = False) -> str:
    dashes = " stroke-dasharray='4 3'" if dashed else ""
    return f"<path d='{path}' fill='none' stroke='{LINE}' stroke-width='1.5'{dashes} marker-end='url(#tip)'/>"


def svg_text(x: float, y: float, text: str) -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' font-size='11.5' fill='{LINE}'>{escape(text)}</text>"


def _box(x: float, y: float, colour: str, name: str, *below: str) -> str:
    fill, border = COLOURS[colour]
    height = BOX_HEIGHT + 18 * (len(below) - 1)
    rows = [
        f"<text x='9' y='{31 + 16 * row}' font-size='11' fill='#3e4c59'>{escape(text)}</text>"
        for row, text in enumerate(below)
    ]
    return (
        f"<g transform='translate({x:.1f} {y:.1f})'><rect width='{BOX_WIDTH}' height='{height}' rx='6'"
        f" fill='{fill}' stroke='{border}' stroke-width='1.3'/><text x='9' y='16' font-size='13'"
        f" font-weight='600' fill='#1f2933'>{escape(name)}</text>" + "".join(rows) + "</g>"
    )


def _x(x: float) -> float:
    """Scales a position across the layers: the report's boxes are wider."""
    return x * BOX_WIDTH / WIDTH


def _y(y: float) -> float:
    """Scales a position along the layers: boxes and the gaps between them are shorter than in the report,
    each by its own factor."""
    layer, rest = divmod(y - MARGIN, HEIGHT + GAP_ALONG)
    inside = rest * BOX_HEIGHT / HEIGHT
    if rest > HEIGHT:
        inside = BOX_HEIGHT + (rest - HEIGHT) * (LAYER - BOX_HEIGHT) / GAP_ALONG
    return MARGIN + layer * LAYER + inside


def _path(path: str) -> str:
    pair = re.compile(r"(-?[\d.]+) (-?[\d.]+)")
    return pair.sub(lambda at: f"{_x(float(at[1])):.1f} {_y(float(at[2])):.1f}", path)


PICTURES = {"plan.svg": plan, "folders.svg": folders}

if __name__ == "__main__":
    for name, draw_it in PICTURES.items():
        (IMAGES / name).write_text(draw_it())
