"""Parts of a comparison of tokenizers, and what a plan refuses of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from tests.flows.conftest import finish

RECIPE = """\
name: tokenizers
sources:
  notes: {{url: "{folder}/dev", format: text, include: ["en.txt"]}}
  dev: {{url: "{folder}/dev", format: text}}
  rows: {{url: "{folder}/dev", format: jsonl, id_column: id, metadata: [language]}}
  talks: {{url: "{folder}/dev", format: chat}}
stages:
  small: {{kind: tokenizer, sources: [notes], vocab_size: 384}}
  large: {{kind: tokenizer, sources: [notes], vocab_size: 512}}
  study:
    kind: evaluate_tokenizers
    tokenizers: {{small: small, theirs: {{path: "{folder}/theirs"}}}}
    sources: [dev]
    parity_to: en
    gates: [{{metric: theirs/parity/de, max: 2}}]
"""
Planned = Callable[..., Plan]


@pytest.fixture
def tokenizers(tmp_path: Path, store: Store) -> Planned:
    """The plan of a comparison, with overrides."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "theirs").mkdir()
    for name, text in {"en": "one\ntwo\n", "de": "eins\nzwei\n"}.items():
        (tmp_path / "dev" / f"{name}.txt").write_text(text)
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    return lambda *overrides: make(load(tmp_path / "recipe.yaml", overrides), store)


def test_only_an_added_tokenizer_is_counted(tokenizers: Planned) -> None:
    plan = tokenizers()
    names = ["small", "large", "study/text", "study/counts/small", "study/counts/theirs", "study"]
    assert list(plan.graph.nodes) == names
    finish(plan, metrics={"theirs/parity/de": 1.0})
    assert tokenizers().pending == []
    more = tokenizers("stages.study.tokenizers.large=large")
    assert [step.node.name for step in more.pending] == ["study/counts/large", "study"]


def test_equal_tokenizers_are_counted_once(tokenizers: Planned) -> None:
    plan = tokenizers("stages.study.tokenizers.again=small")
    assert plan.graph.duplicates == {"study/counts/again": "study/counts/small"}


def test_the_language_of_comparison_and_the_baseline_change_no_counts(tokenizers: Planned) -> None:
    finish(tokenizers(), metrics={"theirs/parity/de": 1.0})
    plan = tokenizers("stages.study.parity_to=de", "stages.study.against=theirs", "stages.study.seed=1")
    assert [step.node.name for step in plan.pending] == ["study"]


@pytest.mark.parametrize(
    ("metrics", "failures"),
    [
        ({"theirs/parity/de": 2.0}, []),
        ({"theirs/parity/de": 2.5}, ["gate on theirs/parity/de: 2.5 is above the allowed 2"]),
    ],
)
def test_a_gate_holds_the_parity_of_a_language(
    tokenizers: Planned, metrics: dict[str, float], failures: list[str]
) -> None:
    finish(tokenizers(), metrics=metrics)
    found = tokenizers().steps["study"].gate_failures
    assert [failure.partition(" (")[0] for failure in found] == failures


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tokenizers.theirs.path=DEV"], r"theirs\.path: no file below .* matches .*tokenizer\.json"),
        (["tokenizers.theirs=huge"], r"tokenizers\.theirs\.stage: there is no stage 'huge'"),
        (["tokenizers.theirs=study"], r"stage 'study' is an evaluate_tokenizers; tokenizer is needed here"),
        (["sources=[nothing]"], r"study\.sources\[0\]: there is no source 'nothing' under sources:"),
        (["sources=[talks]"], r"source 'talks' has format chat; an evaluate_tokenizers needs text"),
        (["gates.0.metric=theirs/parity"], ""),
        (["gates.0.metric=theirs/parities/de"], r"will not have a metric 'theirs/parities/de'"),
        (["gates.0.metric=other/gini"], r"will not have a metric 'other/gini'"),
        (["languages=[de, en]", "gates.0.metric=theirs/parity/fr"], r"not have a metric 'theirs/parity/fr'"),
        (["reference={theirs/ginni: {value: 1, unit: metric, source: x}}"], r"did you mean 'theirs/gini'"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_by_the_plan(
    tokenizers: Planned, tmp_path: Path, overrides: list[str], message: str
) -> None:
    stated = [f"stages.study.{one}".replace("DEV", str(tmp_path / "dev")) for one in overrides]
    if not message:
        assert tokenizers(*stated)
        return
    with pytest.raises(SpecError, match=message):
        tokenizers(*stated)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rows.id_column=null", r"sources\.rows: rows of source 'rows' have languages and no id"),
        ("rows.limit=5", r"sources\.rows\.limit: source 'rows' has a limit, which would cut languages"),
        ("rows={url: DEV, format: warc}", r"source 'rows' has format warc, which has no parallel lines"),
    ],
)
def test_a_source_that_is_not_parallel_is_refused(
    tokenizers: Planned, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "dev" / "lines.jsonl").write_text(json.dumps({"id": 1, "language": "en", "text": "one"}))
    dev = str(tmp_path / "dev")
    with pytest.raises(SpecError, match=message):
        tokenizers("stages.study.sources=[rows]", f"sources.{source}".replace("DEV", dev))
