"""The picture of the README: the stages of a recipe, and which of them a change runs again.

    python -m tools.picture        # writes docs/images/plan.svg

Invariant: the picture is a comparison of two plans of checked-in recipes; the same code draws the same bytes.
"""

from __future__ import annotations

import re
import tempfile
from html import escape
from pathlib import Path

from flows.plan import Plan, make
from flows.report.collect import collect
from flows.report.graph import GAP_ALONG, HEIGHT, MARGIN, WIDTH, draw
from infra.store import Store
from specs.recipe import load

ROOT = Path(__file__).parents[1]
RECIPE, CHANGE = "specs/recipes/mini.yaml", "stages.align.optimizer.lr=1.5e-4"
PICTURE = ROOT / "docs" / "images" / "plan.svg"
BOX_WIDTH, BOX_HEIGHT, LAYER = 172, 38, 62  # pixels; LAYER: from the top of one layer to that of the next
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
# Fill and border; the boxes carry their own background, so the picture reads alike on a light and a dark page.
COLOURS = {"reuse": ("#dcefdf", "#3f7d4b"), "run": ("#ffe3c2", "#c2660c")}
LINE = "#8592a0"


def picture() -> str:
    """The picture as SVG text."""
    with tempfile.TemporaryDirectory() as folder:
        before = make(load(ROOT / RECIPE), Store.open(folder))
        after = make(load(ROOT / RECIPE, [CHANGE]), Store.open(folder))
    boxes = {box.name: box for box in collect(after).boxes}
    drawing = draw({name: box.reads for name, box in boxes.items()}, {name: box.after for name, box in boxes.items()})
    again = changed(before, after)
    width, height = _x(drawing.width) + 2, _y(drawing.height) + 26
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' {FONT}>",
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='3' refY='4' markerWidth='6' markerHeight='6' "
        f"orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='{LINE}'/></marker></defs>",
    ]
    for arrow in drawing.arrows:
        dashes = " stroke-dasharray='4 3'" if arrow.waits else ""
        style = f"fill='none' stroke='{LINE}' stroke-width='1.5'{dashes} marker-end='url(#tip)'"
        lines.append(f"<path d='{_path(arrow.path)}' {style}/>")
    for box in drawing.boxes:
        action = "run" if box.stage in again else "reuse"
        lines.append(_box(_x(box.x), _y(box.y), box.stage, f"{boxes[box.stage].kind} · {action}", action))
    said = {"reuse": "reuse: stored, not computed again", "run": f"run: changed by --set {CHANGE}"}
    for index, (action, text) in enumerate(said.items()):
        fill, border = COLOURS[action]
        x, y = 8 + 250 * index, height - 18
        lines.append(f"<rect x='{x}' y='{y:.0f}' width='11' height='11' rx='2' fill='{fill}' stroke='{border}'/>")
        lines.append(f"<text x='{x + 17}' y='{y + 10:.0f}' font-size='11.5' fill='{LINE}'>{escape(text)}</text>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def changed(before: Plan, after: Plan) -> set[str]:
    """Stages with a part whose fingerprint the other plan does not have."""
    known = {node.fingerprint for node in before.graph.nodes.values()}
    return {node.stage for node in after.graph.nodes.values() if node.fingerprint not in known}


def _box(x: float, y: float, name: str, below: str, action: str) -> str:
    fill, border = COLOURS[action]
    return (
        f"<g transform='translate({x:.1f} {y:.1f})'>"
        f"<rect width='{BOX_WIDTH}' height='{BOX_HEIGHT}' rx='6' fill='{fill}' stroke='{border}' stroke-width='1.3'/>"
        f"<text x='9' y='16' font-size='13' font-weight='600' fill='#1f2933'>{escape(name)}</text>"
        f"<text x='9' y='31' font-size='11' fill='#3e4c59'>{escape(below)}</text></g>"
    )


def _x(x: float) -> float:
    """Across the layers: the report's boxes are wider."""
    return x * BOX_WIDTH / WIDTH


def _y(y: float) -> float:
    """Along the layers: boxes and the room between them are shorter than in the report, each by its own factor."""
    layer, rest = divmod(y - MARGIN, HEIGHT + GAP_ALONG)
    inside = rest * BOX_HEIGHT / HEIGHT
    if rest > HEIGHT:
        inside = BOX_HEIGHT + (rest - HEIGHT) * (LAYER - BOX_HEIGHT) / GAP_ALONG
    return MARGIN + layer * LAYER + inside


def _path(path: str) -> str:
    pair = re.compile(r"(-?[\d.]+) (-?[\d.]+)")
    return pair.sub(lambda at: f"{_x(float(at[1])):.1f} {_y(float(at[2])):.1f}", path)


if __name__ == "__main__":
    PICTURE.write_text(picture())
