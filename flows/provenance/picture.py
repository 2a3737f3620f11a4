"""The picture of a lineage: an SVG file of boxes in layers, from the source files to what was asked for.

Invariants: it holds no script and loads nothing; all text is escaped. The same lineage gives the same bytes.
"""

from jinja2 import Environment, PackageLoader, StrictUndefined

from flows.format import amount, headline
from flows.graph_layout import HEIGHT, WIDTH, draw
from flows.provenance.lineage import Lineage, Member
from specs.errors import counted
from specs.stages import CHECKPOINTS

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
    environment = Environment(
        loader=PackageLoader("flows.provenance", ""), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("picture.svg.jinja").render(
        width=round(max(drawing.width, 560)),
        height=round(drawing.height + TOP + 34),
        top=TOP,
        title=title,
        summary=_summary(lineage),
        arrows=drawing.arrows,
        boxes=[(box, _content(lineage, box.stage)) for box in drawing.boxes],
        box_size=(WIDTH, HEIGHT),
        colours=COLOURS,
    )


def _summary(lineage: Lineage) -> str:
    sources = lineage.sources.values()
    licences = sorted({source.license or "not stated" for source in sources})
    files = sum({source.digest: source.files for source in sources}.values())
    names = counted(len(sources), "source") + (f" of {counted(files, 'file')}" if files else "")
    trained = sum(lineage.trained_on().values())
    return f"{names}; licences: {', '.join(licences) or 'none'}" + (
        f"; {amount(trained)} tokens trained on" if trained else ""
    )


def _content(lineage: Lineage, key: str) -> tuple[str, bool, list[str]]:
    """Of a box: its group among `COLOURS`, whether its border is dashed, and its lines."""
    member = lineage.parts.get(key)
    if member is None:
        source = lineage.sources[key]
        size = f"{counted(source.files, 'file')}, {amount(source.bytes)}B"
        facts = size if source.files else source.language
        licence = f"licence: {source.license or 'not stated'}"
        return "documents", False, [source.name, licence, facts, f"sha-256 {source.digest[:16]}"]
    part = member.part
    group = "result" if part.kind in RESULTS else "training" if part.kind in MODELS else "data"
    at = f", step {member.key.rpartition('@')[2]}" if "@" in member.key else ""
    state = f"{part.fingerprint[:16]} {member.action}"
    texts = [part.name, f"{part.kind}{at}", _numbers(lineage, member), state]
    return group, member.action in ("run", "gone"), texts


def _numbers(lineage: Lineage, member: Member) -> str:
    if train := member.data:
        unit = "conversations" if "conversations" in train else "documents"
        return f"{amount(train.get(unit, 0))} {unit}, {amount(train.get('tokens', 0))} tokens"
    if member.part.kind == "mixture":
        return next(iter(lineage.summary_lines(member)), "")
    if member.steps:
        return f"{counted(member.steps, 'step')}, {amount(member.tokens)} tokens"
    return headline(member.part.results)
