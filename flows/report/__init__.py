"""One HTML file that shows a whole run: graph, training, data, evaluations, samples and lineage.

Owns the page (`template.html.jinja`, `report.css`, `report.js`) and its layout; `collect` reads, the chart
modules draw.

Invariants: the file is self-contained. Its content security policy allows no loading from addresses, and only
the two scripts in it, by their digests. Text from the store is escaped: by Jinja, in JSON by `tojson`, in
figures by `figures.label`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from flows.format import quantity
from flows.graph_layout import HEIGHT, WIDTH, draw
from flows.languages import filters_of, languages_of
from flows.planning.plan import Plan
from flows.report import experiments, language_charts, result_charts, tokenizer_charts, training_charts
from flows.report import wording as words
from flows.report.classifiers import COLUMNS
from flows.report.classifiers import OF_LANGUAGE as CLASSIFIER_OF_LANGUAGE
from flows.report.content import collect
from flows.report.figures import SOURCE_COLOURS, STAGE_COLOURS, Figure, Styles
from flows.report.memorisation import MEASURES, Memorised
from flows.report.rehearsal_charts import RehearsedPart, rehearsals
from flows.report.rehearsal_tables import by_stage, tables
from flows.report.results import PROMPTS, agreement_rows, numbers, undrawn
from flows.report.run_data import Part, Run
from specs.stages.evaluate_tokenizers import OF_LANGUAGE, OF_VOCABULARY, OVER_LANGUAGES

__all__ = ["RehearsedPart", "render"]


def render(plan: Plan, rehearsed: Sequence[RehearsedPart] = ()) -> str:
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
    environment.filters |= {"amount": quantity, "shown": words.shown, "duration": words.duration}
    environment.filters |= {"pretty": words.pretty, "elided": words.elided, "signed": words.signed}
    charts = Charts.of(run, rehearsed)
    return environment.from_string(_asset("template.html.jinja")).render(
        run=run,
        charts=charts,
        rehearsed=by_stage(rehearsed),
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
        by_cost=tokenizer_charts.by_cost,
        label_columns=COLUMNS,
        language_columns=CLASSIFIER_OF_LANGUAGE,
        corpora=_corpora(run),
        filters_of=filters_of,
        languages={part.name: languages_of(part.metrics) for part in _corpora(run)},
        kinds={stage.kind for stage in run.stages},
        prompts_shown=PROMPTS,
        policy=f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {digests}",
        css=Markup(_asset("report.css")),
        scripts=[Markup(script) for script in scripts],
    )


def _asset(name: str) -> str:
    return files("flows.report").joinpath(name).read_text(encoding="utf-8")


@dataclass
class Charts:
    """The figures by section of the page, and all of them by their ids on the page."""

    experiments: list[Figure] = field(default_factory=list)
    training: list[Figure] = field(default_factory=list)
    mixtures: list[Figure] = field(default_factory=list)
    masked: list[Figure] = field(default_factory=list)
    evaluation: list[Figure] = field(default_factory=list)
    rewards: list[Figure] = field(default_factory=list)
    tokenizers: list[Figure] = field(default_factory=list)
    languages: list[Figure] = field(default_factory=list)
    rehearsals: dict[str, list[Figure]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, rehearsed: Sequence[RehearsedPart] = ()) -> Charts:
        stages = Styles(
            [stage.name for stage in run.stages if any(part.steps for part in stage.parts)], STAGE_COLOURS
        )
        sources = Styles(_source_names(run), SOURCE_COLOURS)
        look = result_charts.styles(run.evaluations, stages)
        losses, masked = (
            training_charts.losses(run.curves, stages, sources),
            training_charts.masked(run.curves, stages),
        )
        own = [curve for curve in run.curves if curve.kind in training_charts.OWN_LOSS or curve.extras]
        difference = result_charts.differences(run.evaluations, look)
        compared = [(evaluation, evaluation.rewards) for evaluation in run.evaluations if evaluation.rewards]
        asked = [experiments.draw(name, found) for name, found in run.experiments.items()]
        return cls(
            [figure for figure in asked if figure is not None],
            [
                *([losses] if losses else []),
                *(training_charts.own_losses(curve, stages) for curve in own),
                *(training_charts.norms(curve, stages) for curve in run.curves if curve.norms),
            ],
            [training_charts.mixtures(run.mixtures, sources)] if run.mixtures else [],
            [masked] if masked else [],
            result_charts.results(run.evaluations, look),
            [
                result_charts.rewards(evaluation.name, found, look[evaluation.name], stages)
                for evaluation, found in compared
            ]
            + ([difference] if difference else [])
            + [
                result_charts.quantiles(part.name, counts, numbers(part.metrics.get("without_pair")))
                for part in run.parts
                if (counts := _histogram(part))
            ],
            [tokenizer_charts.parities(compared) for compared in run.tokenizers],
            language_charts.outcomes([(part.name, languages_of(part.metrics)) for part in _corpora(run)]),
            rehearsals(rehearsed),
        )

    def name(self, figure: Figure) -> str:
        """The id of a figure on the page."""
        return f"chart-{next(index for index, other in enumerate(self.all) if other is figure)}"

    @property
    def all(self) -> list[Figure]:
        return [
            *self.experiments,
            *self.training,
            *self.mixtures,
            *self.masked,
            *self.evaluation,
            *self.rewards,
            *self.tokenizers,
            *self.languages,
            *(figure for figures in self.rehearsals.values() for figure in figures),
        ]

    @property
    def plots(self) -> dict[str, Any]:
        """The plots for the page's script. Numbers that JSON cannot represent were left out when they were
        read."""
        return {self.name(figure): figure.plot | {"height": figure.height} for figure in self.all}


def _corpora(run: Run) -> list[Part]:
    return [part for part in run.parts if isinstance(part.metrics.get("read"), dict)]


def _source_names(run: Run) -> list[str]:
    """The names of all sources with a colour: those of mixtures first, then those that are only held out."""
    names = [share.source for shares in run.mixtures.values() for share in shares]
    return names + [name for curve in run.curves for name in curve.heldout]


def _histogram(part: Part) -> list[float]:
    counts = part.metrics.get("quantile_histogram")
    return list(numbers(dict(enumerate(counts))).values()) if isinstance(counts, list) else []
