"""One HTML file that shows a whole run: graph, training, data, evaluations, samples and lineage.

Owns the page (`template.html.jinja`, `report.css`, `report.js`); `collect` reads, the chart modules draw.

Invariants: the file is self-contained. Its content security policy allows no loading from addresses, and only
the two scripts in it, by digest. Text is escaped: by Jinja, in JSON by `tojson`, in figures by `label`.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from apertus_model.rehearsal.records import PartResult
from flows.format import duration, quantity
from flows.graph_layout import HEIGHT, WIDTH, draw
from flows.languages import LanguageCounts, filters_of, languages_of
from flows.planning.plan import Plan
from flows.rehearsal_tables import tables
from flows.report import experiment_charts, language_charts, result_charts, training_charts
from flows.report import wording as words
from flows.report.claims import claims_of
from flows.report.content import collect
from flows.report.figures import SOURCE_COLOURS, STAGE_COLOURS, Figure, Styles
from flows.report.memorisation import MEASURES, Memorised
from flows.report.rehearsal import by_stage, rehearsals
from flows.report.results import (
    COLUMNS,
    PROMPTS,
    agreement_rows,
    numbers,
    undrawn,
)
from flows.report.results import OF_LANGUAGE as CLASSIFIER_OF_LANGUAGE
from flows.report.run_data import RunContent
from flows.stored_part import StoredPart
from specs.stages.evaluate_tokenizers import OF_LANGUAGE, OF_VOCABULARY, OVER_LANGUAGES


def render(plan: Plan, rehearsed: Sequence[PartResult] = ()) -> str:
    """The report of a plan and its store, and of parts that were rehearsed, as HTML."""
    run = collect(plan)
    scripts = [get_plotlyjs(), _asset("report.js")]
    digests = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"amount": quantity, "duration": duration, "elided": words.elided}
    environment.filters |= {"pretty": words.pretty, "shown": words.shown, "signed": words.signed}
    corpora = [part for part in run.parts if isinstance(part.metrics.get("read"), dict)]
    languages = {part.name: languages_of(part.metrics) for part in corpora}
    charts = charts_of(run, languages)
    charts_of_parts = rehearsals(rehearsed)
    figures = [figure for group in (*charts.values(), *charts_of_parts.values()) for figure in group]
    ids = {id(figure): f"chart-{index}" for index, figure in enumerate(figures)}
    return environment.from_string(_asset("template.html.jinja")).render(
        run=run,
        charts=charts,
        claims_of=claims_of,
        chart_id=lambda figure: ids[id(figure)],
        # numbers that JSON cannot represent were left out when they were read
        plots={ids[id(figure)]: figure.plot | {"height": figure.height} for figure in figures},
        rehearsed=by_stage(rehearsed),
        rehearsed_charts=charts_of_parts,
        rehearsed_tables=tables,
        drawing=draw({box.name: box.reads for box in run.boxes}, {box.name: box.after for box in run.boxes}),
        box={"width": WIDTH, "height": HEIGHT},
        boxes={stage.name: stage for stage in run.boxes},
        anchors={stage.name: f"stage-{index}" for index, stage in enumerate(run.stages)},
        lines={stage.name: words.stage_lines(stage) for stage in run.boxes},
        other_metrics=undrawn(run.evaluations),
        memorised=[
            (evaluation, table)
            for evaluation in run.evaluations
            if (table := Memorised.of(evaluation.metrics)).rows
        ],
        measures=MEASURES,
        agreement_rows=agreement_rows(run.agreements),
        of_language=OF_LANGUAGE,
        over_languages=OF_LANGUAGE | OVER_LANGUAGES,
        of_vocabulary={"vocabulary": "tokens of the vocabulary"} | OF_VOCABULARY,
        by_cost=language_charts.by_cost,
        label_columns=COLUMNS,
        language_columns=CLASSIFIER_OF_LANGUAGE,
        corpora=corpora,
        filters_of=filters_of,
        languages=languages,
        kinds={stage.kind for stage in run.stages},
        prompts_shown=PROMPTS,
        policy=f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {digests}",
        css=Markup(_asset("report.css")),
        scripts=[Markup(script) for script in scripts],
    )


def _asset(name: str) -> str:
    return files("flows.report").joinpath(name).read_text(encoding="utf-8")


def charts_of(run: RunContent, languages: dict[str, list[LanguageCounts]]) -> dict[str, list[Figure]]:
    """The figures by section of the page. `languages`: of corpora, by part."""
    stages = Styles(
        [stage.name for stage in run.stages if any(part.node.steps for part in stage.parts)], STAGE_COLOURS
    )
    # those of mixtures first, then those that are only held out
    names = [share.source for shares in run.mixtures.values() for share in shares]
    sources = Styles([*names, *(name for curve in run.curves for name in curve.heldout)], SOURCE_COLOURS)
    look = result_charts.styles(run.evaluations, stages)
    own = [curve for curve in run.curves if curve.kind in training_charts.OWN_LOSS or curve.extras]
    charts: dict[str, list[Figure | None]] = {
        "experiments": [experiment_charts.draw(name, drawn) for name, drawn in run.experiments.items()],
        "training": [
            training_charts.losses(run.curves, stages, sources),
            *(training_charts.own_losses(curve, stages) for curve in own),
            *(training_charts.norms(curve, stages) for curve in run.curves if curve.norms),
        ],
        "mixtures": [training_charts.mixtures(run.mixtures, sources)] if run.mixtures else [],
        "masked": [training_charts.masked(run.curves, stages)],
        "evaluation": [*result_charts.results(run.evaluations, look)],
        "rewards": [
            *(
                result_charts.rewards(evaluation.name, evaluation.rewards, look[evaluation.name], stages)
                for evaluation in run.evaluations
                if evaluation.rewards
            ),
            result_charts.differences(run.evaluations, look),
            *(
                result_charts.quantiles(part.name, counts, numbers(part.metrics.get("without_pair")))
                for part in run.parts
                if (counts := _histogram(part))
            ),
        ],
        "tokenizers": [language_charts.parities(compared) for compared in run.tokenizers],
        "languages": [*language_charts.outcomes(languages)],
    }
    return {name: [figure for figure in group if figure is not None] for name, group in charts.items()}


def _histogram(part: StoredPart) -> list[float]:
    counts = part.metrics.get("quantile_histogram")
    return list(numbers(dict(enumerate(counts))).values()) if isinstance(counts, list) else []
