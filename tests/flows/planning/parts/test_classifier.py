"""Parts of classifiers and of scores: what is made again after a change, and what a plan refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.classifier import ScoresPart
from tests.flows.comparing import changed
from tests.flows.conftest import finish

RECIPE = """
name: scored
{assumed}
sources:
  good: {{url: "{folder}/good", format: jsonl}}
  bad: {{url: "{folder}/bad", format: jsonl}}
  web: {{url: "{folder}/web", format: jsonl, metadata: [language]}}
stages:
  tokenizer: {{kind: tokenizer, sources: [web], vocab_size: 512, bytes_per_source: 50_000}}
  quality:
    kind: classifier
    sources: {{good: {{label: good}}, bad: {{label: bad}}}}
    training: {training}
    language_column: language
    reference: web
    percentiles: [90, 95]
    gates: [{{metric: accuracy, min: 0.8}}]
  corpus:
    kind: corpus
    tokenizer: tokenizer
    sources:
      web: {{holdout: 0.2, filters: [{filter}]}}
"""
FASTTEXT = "{method: fasttext, dim: 4, buckets: 100}"
FILTER = "{filter: score, model: {from: quality, label: good}, min: p90, by: language}"
Scored = Callable[..., Plan]


@pytest.fixture
def scored(tmp_path: Path, store: Store) -> Scored:
    """`scored("a.b=c", training=, filter_=, assumed=, more=)`: a plan; `more`: stages."""
    for name in ("good", "bad", "web"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"text": "a", "language": "de"}\n')

    def plan(
        *overrides: str, training: str = FASTTEXT, filter_: str = FILTER, assumed: str = "", more: str = ""
    ) -> Plan:
        text = RECIPE.format(folder=tmp_path, training=training, filter=filter_, assumed=assumed)
        (tmp_path / "scored.yaml").write_text(text + more)
        return make(load(tmp_path / "scored.yaml", overrides), store)

    return plan


def folder_of(tmp_path: Path, *names: str, labels: list[str] | None = None) -> Path:
    """A folder of a model with empty files, but config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    config = {"id2label": dict(enumerate(labels))} if labels else {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mlp(folder: Path, **more: Any) -> str:
    return json.dumps({"method": "mlp", "encoder": str(folder), **more})


def test_each_source_is_read_in_a_part_of_its_own(scored: Scored) -> None:
    nodes = scored().graph.nodes
    assert list(nodes) == [
        *("tokenizer", "quality/good", "quality/bad", "quality/web", "quality"),
        *("corpus/web/scores-1", "corpus/web"),
    ]
    assert {role: read.name for role, read in nodes["corpus/web/scores-1"].inputs.items()} == {
        "documents": "web",
        "classifier": "quality",
    }
    assert nodes["corpus/web"].inputs["scores:0"].name == "corpus/web/scores-1"


def test_another_threshold_scores_nothing_again(scored: Scored) -> None:
    plan = scored()
    finish(plan)
    assert {step.action for step in plan.steps.values()} == {"run"}
    for bound in ("min: p95", "max: p95", "min: 0.3"):
        again = scored(filter_=FILTER.replace("min: p90, by: language", bound))
        assert {name for name, step in again.steps.items() if step.action == "run"} == {"corpus/web"}
    cut = FILTER.replace("min: p90", "min: 0.1, cutoffs: {de: 0.2}, ceilings: {fr: 0.9}")
    assert changed(plan, scored(filter_=cut)) == {"corpus/web"}
    other = scored(filter_=FILTER.replace("label: good", "label: bad"))
    assert changed(plan, other) == {"corpus/web/scores-1", "corpus/web"}


def test_another_column_or_division_of_work_scores_nothing_again(scored: Scored) -> None:
    plan = scored()
    assert changed(plan, scored("sources.web.metadata=[language, url]")) == {"tokenizer", "corpus/web"}
    assert not changed(plan, scored("stages.corpus.files_per_task=1", "stages.quality.files_per_task=1"))
    assert not changed(plan, scored("stages.quality.gates=[]"))


def test_another_hidden_size_embeds_nothing_again(scored: Scored, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "model.safetensors", "tokenizer.json")
    plan = scored(training=mlp(folder))
    after = changed(plan, scored(training=mlp(folder, hidden=768, epochs=3)))
    assert after == {"quality", "corpus/web/scores-1", "corpus/web"}
    assert "quality/good" in changed(plan, scored(training=mlp(folder, max_tokens=128)))
    (folder / "model.safetensors").write_text("other")
    after = changed(plan, scored(training=mlp(folder)))
    assert after == {"quality/good", "quality/bad", "quality/web", "quality", *after} and len(after) == 6


def test_a_model_needs_a_gpu_unless_it_is_fasttext(scored: Scored, tmp_path: Path) -> None:
    def gpus(plan: Plan, name: str) -> int:
        node = plan.graph.nodes[name]
        return node.part.gpus_of_worker(node.launch)

    plan = scored()
    assert [gpus(plan, name) for name in ("quality/good", "quality", "corpus/web/scores-1")] == [0, 0, 0]
    plan = scored(training=mlp(folder_of(tmp_path, "model.safetensors", "tokenizer.json")))
    assert [gpus(plan, name) for name in ("quality/good", "quality", "corpus/web/scores-1")] == [1, 0, 1]


def test_a_missing_encoder_can_be_assumed(scored: Scored, tmp_path: Path) -> None:
    training = mlp(tmp_path / "nowhere")
    with pytest.raises(SpecError, match=r"stages\.quality\.training\.encoder: there is nothing at .*nowhere"):
        scored(training=training)
    plan = scored(training=training, assumed=f"assumed_inputs: {{files: ['{tmp_path}/nowhere']}}")
    assert plan.steps["corpus/web/scores-1"].unavailable and not plan.steps["tokenizer"].unavailable


def test_a_failed_gate_stops_what_reads_the_classifier(scored: Scored) -> None:
    plan = scored()
    finish(plan, "quality/good", "quality/bad", "quality/web", "quality", metrics={"accuracy": 0.7})
    steps = scored().steps
    (failure,) = steps["quality"].gate_failures
    assert failure.startswith("gate on accuracy: 0.7 is below the required 0.8 (")
    assert not scored("stages.quality.gates=[{metric: accuracy, min: 0.6}]").steps["quality"].gate_failures


def test_conversations_are_scored_in_a_part_of_their_own(scored: Scored, tmp_path: Path) -> None:
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "a.jsonl").write_text('{"messages": []}\n')

    def planned(filter_: str) -> Plan:
        talks = f"sources: {{talks: {{filters: [{filter_}]}}}}"
        return scored(
            f"sources.talks={{url: '{tmp_path}/talks', format: chat}}",
            more=f"  chat: {{kind: conversations, tokenizer: tokenizer, {talks}}}\n",
        )

    plan = planned(SCORE + "of: answer, min: p90}")
    finish(plan)
    part = plan.graph.nodes["chat/talks"]
    assert part.inputs["scores:0"].name == "chat/talks/scores-1"
    again = planned(SCORE + "of: answer, max: 0.3}")
    assert {name for name, step in again.steps.items() if step.action == "run"} == {"chat/talks"}
    whole = planned(SCORE + "min: p90}")
    assert changed(plan, whole) == {"chat/talks/scores-1", "chat/talks"}
    with pytest.raises(SpecError, match="two filters make the column 'score'"):
        planned(f"{SCORE}min: 1}}, {SCORE}max: 2}}")


SCORE = "{filter: score, model: {from: quality, label: good}, "


@pytest.mark.parametrize(
    ("filter_", "message"),
    [
        (SCORE.replace("label: good", "label: god") + "min: 1}", "'quality' has no label 'god'.*'good'"),
        (SCORE + "min: p99}", "'quality' stores p90, p95, not p99. Fix: add 99 to the percentiles"),
        (
            SCORE + "min: 1, column: language}",
            "source 'web' already has column 'language', which the filter adds",
        ),
        ("{filter: score, model: {from: tokenizer, label: a}, min: 1}", "a tokenizer; classifier is needed"),
        ("{filter: score, model: {from: nothing, label: a}, min: 1}", "there is no stage 'nothing'"),
        (f"{SCORE}min: 1}}, {SCORE}min: 2}}", "two filters make the column 'score'"),
    ],
)
def test_a_filter_that_does_not_fit_its_model_is_refused(scored: Scored, filter_: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        scored(filter_=filter_)


def test_a_percentile_by_language_needs_a_language_column(scored: Scored) -> None:
    with pytest.raises(SpecError, match=r"filters\[0\]\.by: 'quality' states no language_column"):
        scored("stages.quality.language_column=null")


def test_a_model_for_each_language_reads_the_language_of_what_it_scores(scored: Scored) -> None:
    plan, one = scored("stages.quality.by_language=true"), scored()
    part = plan.graph.nodes["corpus/web/scores-1"].part
    assert isinstance(part, ScoresPart)
    assert (part.language_column, part.source.metadata) == ("language", ["language"])
    assert changed(one, plan) == {"quality", "corpus/web/scores-1", "corpus/web"}
    with pytest.raises(SpecError, match="by_language needs the language of each document; set language_"):
        scored("stages.quality.by_language=true", "stages.quality.language_column=null")
    with pytest.raises(
        SpecError, match="has a model for each language, and documents of format text have no"
    ):
        scored("stages.quality.by_language=true", "stages.quality.reference=null", "sources.web.format=text",
               "sources.web.metadata=[]", filter_=SCORE + "min: 0.5}")  # fmt: skip


def test_a_gate_on_a_metric_that_will_not_be_measured_is_refused(scored: Scored) -> None:
    with pytest.raises(SpecError, match=r"'quality' will not have a metric 'recal/good'.*recall/good"):
        scored("stages.quality.gates=[{metric: recal/good, min: 0.6}]")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.quality.sources.good={label_column: kind}",
            "reads column 'kind', which documents of format",
        ),
        ("stages.quality.reference=nowhere", "there is no source 'nowhere' under sources:"),
        ("stages.quality.reference=good", "reference 'good' is trained on"),
        ("stages.quality.sources.bad.label=good", "all sources have the label good"),
    ],
)
def test_sources_that_cannot_be_learned_from_are_refused(scored: Scored, override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        scored(override, *(["sources.good.format=text"] if "label_column" in override else []))


def test_a_folder_without_safetensors_or_tokenizer_is_refused(scored: Scored, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "pytorch_model.bin", "tokenizer.json")
    with pytest.raises(SpecError, match=r"model has no safetensors; it has config\.json, tokenizer\.json"):
        scored(training=mlp(folder))
    (folder / "model.safetensors").write_text("weights")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SpecError, match="model has no tokenizer"):
        scored(training=mlp(folder))


def test_the_label_of_a_folder_is_looked_up(scored: Scored, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "model.safetensors", "tokenizer.json", labels=["fine", "toxic"])
    filter_ = f"{{filter: score, model: {{url: '{folder}', label: LABEL}}, max: 0.9}}"
    assert (
        "model" in scored(filter_=filter_.replace("LABEL", "toxic")).graph.nodes["corpus/web/scores-1"].inputs
    )
    with pytest.raises(SpecError, match=r"model\.label: .*model has no label 'toxik'.*'toxic'"):
        scored(filter_=filter_.replace("LABEL", "toxik"))
    (folder / "config.json").write_text("no json")
    with pytest.raises(SpecError, match=r"model\.url: config\.json of .*model cannot be read"):
        scored(filter_=filter_.replace("LABEL", "toxic"))


def test_a_fasttext_file_is_an_input_by_content(scored: Scored, tmp_path: Path) -> None:
    filter_ = f"{{filter: score, model: {{url: '{tmp_path}/lid.bin', label: de}}, min: 0.9}}"
    with pytest.raises(SpecError, match=r"filters\[0\]\.model\.url: there is nothing at .*lid\.bin"):
        scored(filter_=filter_)
    (tmp_path / "lid.bin").write_bytes(b"one")
    one = scored(filter_=filter_)
    (tmp_path / "lid.bin").write_bytes(b"another")
    assert changed(one, scored(filter_=filter_)) == {"corpus/web/scores-1", "corpus/web"}
