"""Mixtures as the planner sees them: mixtures of mixtures, sizes, annealing, exclusion, and what the sources can give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.planning.graph import Graph, Input, Node
from flows.planning.mixtures import corpora, limits, shares
from flows.planning.parts.builder import reads
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.launch import Launch
from specs.recipe import load
from specs.stages.mixture import MixturePart
from specs.stages.training import Segment
from tests.flows.conftest import finish
from tests.recipes import RECIPE, write_recipe

BASE = (
    RECIPE.replace(
        "sources:\n",
        'sources:\n  pages: {{url: "{documents}", format: text, include: ["note-0*.txt"]}}\n'
        '  sums: {{url: "{documents}", format: text, include: ["note-1*.txt"]}}\n',
        1,
    )
    .replace("sources: {{notes: {{holdout: 0.2}}}}", "sources: {{notes: {{}}, pages: {{}}, sums: {{}}}}")
    .replace("  second: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100, seed: 29}}\n", "{second}")
    .replace("  main: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100}}\n", "{main}")
)
MAIN = "  main: {kind: mixture, weights: {corpus/notes: 3, corpus/pages: 2}, max_repetition: 100}\n"
SECOND = "  second: {kind: mixture, weights: {main: 70, corpus/sums: 30}, max_repetition: 100}\n"
TOKENS = {"corpus/notes": 40_000, "corpus/pages": 40_000, "corpus/sums": 40_000}

Planned = Callable[..., Plan]


@pytest.fixture
def mixed(tmp_path: Path, store: Store) -> Planned:
    """`mixed("a.b=c", ..., main=, second=)`: the plan of the tiny recipe with other mixtures."""

    def plan(*overrides: str, main: str = MAIN, second: str = SECOND) -> Plan:
        quote = [text.replace("{", "{{").replace("}", "}}") for text in (main, second)]
        return make(load(write_recipe(tmp_path, BASE.replace("{main}", quote[0]).replace("{second}", quote[1])), overrides), store)

    return plan


def _shares(plan: Plan, name: str) -> dict[str, float]:
    names = {read.fingerprint: read.name for read in corpora(plan.graph, name)}
    found = shares(plan.graph, name, lambda node: TOKENS[node.name])
    return {names[fingerprint]: float(share) for fingerprint, share in found.items()}


def _segments(plan: Plan) -> dict[str, Any]:
    return {name: node.part for name, node in plan.graph.nodes.items() if isinstance(node.part, Segment)}


def _excluded(plan: Plan, name: str) -> dict[str, int]:
    node = plan.graph.nodes[name]
    return {node.inputs[f"excluded:{index}"].name: samples for index, samples in enumerate(node.part.excluded)}  # type: ignore[attr-defined]


def test_nested_mixture_resolves_to_shares_of_corpora(mixed: Planned) -> None:
    plan = mixed()
    assert _shares(plan, "main") == {"corpus/notes": 0.6, "corpus/pages": 0.4}
    assert _shares(plan, "second") == pytest.approx({"corpus/notes": 0.42, "corpus/pages": 0.28, "corpus/sums": 0.3})
    assert sorted(plan.graph.nodes["pretrain/2"].part.source_names) == sorted(TOKENS)  # type: ignore[attr-defined]
    assert plan.graph.parents(plan.graph.nodes["second"]) != plan.graph.parents(plan.graph.nodes["main"])


levels = st.lists(st.dictionaries(st.integers(0, 9), st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5)


@given(levels)
def test_shares_of_nested_mixtures_are_sums_over_all_paths(chosen: list[dict[int, int]]) -> None:
    graph = Graph()
    nodes = [_node(graph, f"corpus{number}", MixturePart(weights=[], seed=number), {}, "corpus") for number in range(3)]
    for number, weights in enumerate(chosen):
        merged: dict[int, int] = {}
        for pick, weight in weights.items():
            merged[pick % len(nodes)] = merged.get(pick % len(nodes), 0) + weight
        inputs = {f"source:{index}": reads(nodes[pick]) for index, pick in enumerate(merged)}
        nodes.append(_node(graph, f"mixture{number}", MixturePart(weights=list(merged.values()), seed=7), inputs, "mixture"))

    def ways(node: Node, share: Fraction) -> Iterator[tuple[str, Fraction]]:
        if node.kind == "corpus":
            yield node.fingerprint, share
            return
        weights = node.part.weights  # type: ignore[attr-defined]  # of a mixture
        for read, weight in zip(node.inputs.values(), weights, strict=True):
            yield from ways(graph.nodes[read.name], share * Fraction(weight, sum(weights)))

    expected: dict[str, Fraction] = {}
    for corpus, share in ways(nodes[-1], Fraction(1)):
        expected[corpus] = expected.get(corpus, Fraction(0)) + share
    assert shares(graph, nodes[-1].name, lambda node: 1) == expected
    assert [read.fingerprint for read in corpora(graph, nodes[-1].name)] == sorted(expected)


def _node(graph: Graph, name: str, part: MixturePart, inputs: dict[str, Input], kind: str) -> Node:
    graph.nodes[name] = Node(name, name, kind, 1, part, inputs, Launch())
    return graph.nodes[name]


def test_sizes_stand_in_for_weights(mixed: Planned) -> None:
    second = "  second: {kind: mixture, proportional: {corpus/notes: 1, corpus/sums: 3}, max_repetition: 100}\n"
    assert _shares(mixed(second=second), "second") == {"corpus/notes": 0.25, "corpus/sums": 0.75}
    plain = mixed(second="  second: {kind: mixture, proportional: [corpus/notes, corpus/sums], max_repetition: 100}\n")
    finish(plain)
    passes = {usage.source: usage.passes for usage in mixed(second=plain_second()).source_usage if usage.stage == "pretrain"}
    assert passes["corpus/sums"] == pytest.approx((4 * 4 + 4 * 8) / 2 / (39_999 // 32))


def plain_second() -> str:
    return "  second: {kind: mixture, proportional: [corpus/notes, corpus/sums], max_repetition: 100}\n"


def test_limit_of_a_weight_wins_over_inner_mixtures(mixed: Planned) -> None:
    plan = mixed(second="  second: {kind: mixture, weights: {main: 1, corpus/sums: {weight: 1, max_repetition: 7}}}\n")
    names = {node.fingerprint: node.name for node in plan.graph.nodes.values()}
    found = {names[corpus]: limit for corpus, limit in limits(plan.graph, plan.pipeline, "second").items()}
    assert found == {"corpus/notes": 100, "corpus/pages": 100, "corpus/sums": 7}
    plan = mixed(second="  second: {kind: mixture, weights: {main: {weight: 1, max_repetition: 9}, corpus/notes: 1}, max_repetition: 5}\n")
    assert {names[corpus]: limit for corpus, limit in limits(plan.graph, plan.pipeline, "second").items()} == {
        "corpus/notes": 5,
        "corpus/pages": 9,
    }


def test_pieces_of_an_annealed_mixture_exclude_earlier_ones(mixed: Planned) -> None:
    main = (
        "  main: {kind: mixture, weights: {corpus/notes: 1}, max_repetition: 100, "
        "anneal: {to: {corpus/pages: 1}, over: 6 steps, pieces: 3}}\n"
    )
    plan = mixed(main=main, second="  second: {kind: mixture, weights: {corpus/sums: 1}, max_repetition: 100}\n")
    assert [(name, part.start_step, part.end_step) for name, part in _segments(plan).items()] == [
        *[("pretrain/1", 0, 2), ("pretrain/2", 2, 4), ("pretrain/3", 4, 6), ("pretrain/4", 6, 8)],
        *[("pretrain/5", 8, 12), ("pretrain/6", 12, 16), ("cooldown/1", 0, 2), ("cooldown/2", 2, 4), ("cooldown/3", 4, 6)],
    ]
    pages = [_shares(plan, f"main/{piece}").get("corpus/pages", 0.0) for piece in (1, 2, 3, 4)]
    assert pages == pytest.approx([1 / 6, 1 / 2, 5 / 6, 1.0])
    assert _excluded(plan, "pretrain/3") == {"main/1": 8, "main/2": 8}
    assert _excluded(plan, "pretrain/5") == {}
    # The cooldown goes on in the same mixture: its own piece by the counter, the others by exclusion.
    assert _segments(plan)["cooldown/1"].sample_offset == 8
    assert _excluded(plan, "cooldown/1") == {"main/2": 8, "main/3": 8, "main/4": 8}


def test_an_anneal_that_does_not_fit_is_refused(mixed: Planned) -> None:
    main = "  main: {kind: mixture, weights: {corpus/notes: 1}, anneal: {to: {corpus/pages: 1}, over: STEPS, pieces: 3}}\n"
    with pytest.raises(SpecError, match=r"'main' is annealed over 9 steps, 1,024 tokens are trained on it"):
        mixed(main=main.replace("STEPS", "9 steps"))
    with pytest.raises(SpecError, match=r"3 pieces over 2 steps, which is less than a batch for each"):
        mixed(main=main.replace("STEPS", "2 steps"))


def test_exclusion_holds_across_segments_and_later_stages(mixed: Planned) -> None:
    second = SECOND.replace("max_repetition", "exclude: [pretrain], max_repetition")
    plan = mixed(second=second)
    # pretrain: 8 steps of 4 of main, then 4 of 4 and 4 of 8 of second; the cooldown draws main, which excludes nothing.
    assert [_excluded(plan, name) for name in ("pretrain/1", "pretrain/2", "pretrain/3", "cooldown")] == [
        {},
        {"main": 32},
        {"main": 32},
        {},
    ]
    plan = mixed("stages.cooldown.mixture=second", "stages.cooldown.carry=[weights]", second=second)
    assert _excluded(plan, "cooldown") == {"main": 32}
    assert _segments(plan)["cooldown"].sample_offset == 4 * 4 + 4 * 8
    plan = mixed("stages.cooldown.mixture=second", "stages.cooldown.from=pretrain@step=10", second=second)
    assert (_excluded(plan, "cooldown"), _segments(plan)["cooldown"].sample_offset) == ({"main": 32}, 8)
    plain = mixed("stages.cooldown.mixture=second", "stages.cooldown.carry=[weights]")
    assert (_excluded(plain, "cooldown"), _segments(plain)["cooldown"].sample_offset) == ({}, 0)


def test_exclusion_that_cannot_be_exact_is_refused(mixed: Planned) -> None:
    second = SECOND.replace("max_repetition", "exclude: [pretrain], max_repetition")
    with pytest.raises(
        SpecError, match=r"second\.seed: .* seed 3 and excludes samples of 'pretrain' from 'corpus/.*' through 'main' of seed 28"
    ):
        mixed("stages.second.seed=3", second=second)
    with pytest.raises(SpecError, match=r"in sequences of 32 \(concatenate\); here sequences have 64 \(concatenate\)"):
        mixed("stages.cooldown.mixture=second", "stages.cooldown.sequence_length=64", second=second)
    with pytest.raises(SpecError, match=r"in sequences of 32 \(concatenate\); here sequences have 32 \(best-fit\)"):
        mixed("stages.cooldown.mixture=second", "stages.cooldown.packing=best-fit", second=second)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{weights: {nothing: 1}}", "there is no stage 'nothing'"),
        ("{weights: {corpus/nots: 1}}", "did you mean 'notes'"),
        ("{weights: {corpus/notes: 0}}", "a weight of 0 draws nothing; leave the source out"),
        ("{weights: {corpus/notes: 1}, proportional: [corpus/notes]}", "either weights: .* or proportional"),
        ("{}", "either weights: .* or proportional"),
        ("{proportional: [corpus/notes, corpus/notes]}", "corpus/notes is repeated"),
        ("{proportional: [main]}", "stage 'main' is a mixture; corpus is needed here"),
        ("{weights: {second: 1}}", "the stages form a cycle: second -> second"),
        ("{weights: {main: 1}, exclude: [corpus]}", "stage 'corpus' is a corpus; one of cooldown"),
        ("{weights: {main: 1}, exclude: [pretrain@step=3]}", "exclude names stages as a whole; write 'pretrain'"),
        ("{proportional: [corpus/notes], anneal: {to: {main: 1}, over: 8 steps}}", "anneal goes from weights to weights"),
    ],
)
def test_a_wrong_mixture_is_refused_with_the_fix(mixed: Planned, second: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        mixed(second=f"  second: {second.replace('{', '{kind: mixture, ', 1).replace(', }', '}')}\n")


def test_annealed_mixture_is_refused_inside_another(mixed: Planned) -> None:
    main = MAIN.replace("max_repetition", "anneal: {to: {corpus/pages: 1}, over: 4 steps, pieces: 2}, max_repetition")
    with pytest.raises(SpecError, match="mixture 'main' is annealed"):
        mixed(main=main)


def test_passes_count_from_new_weights_and_the_needed_factor_is_named(mixed: Planned) -> None:
    finish(mixed())
    windows = 39_999 // 32
    usages = {(usage.stage, usage.source): usage for usage in mixed("stages.cooldown.budget=100 steps").source_usage}
    notes = usages["cooldown", "corpus/notes"]
    # main: 32 samples in pretrain, 800 in the cooldown, 60% notes; second: 48 samples, 42%.
    assert notes.passes == pytest.approx((832 * 0.6 + 48 * 0.42) / windows)
    assert notes.tokens == pytest.approx(800 * 0.6 * 32)
    assert (notes.available, notes.exact, notes.sequences, notes.allowed, notes.shortfall) == (40_000, True, windows, 100, 0)
    with pytest.raises(SpecError) as caught:
        mixed("stages.cooldown.budget=100 steps", "stages.main.max_repetition=0.4")
    passes = (832 * 0.6 + 48 * 0.42) / windows
    assert f"from 'corpus/notes' through mixture 'main', which holds 40,000 training tokens ({windows:,} sequences of 32)" in str(
        caught.value
    )
    assert f"{passes / 0.4:.2f} times as much" in str(caught.value)
    assert "raise max_repetition to 0.5" in str(caught.value)


def test_common_ancestors_of_merged_checkpoints_count_once(mixed: Planned) -> None:
    merged = SECOND + "  average: {kind: merge, checkpoints: [pretrain@step=6, pretrain@step=8]}\n"
    overrides = ["stages.cooldown.from=average", "stages.cooldown.carry=[weights]", "stages.cooldown.optimizer.lr=1e-3"]
    finish(mixed(*overrides, second=merged))
    again = mixed(*overrides, second=merged)
    notes = next(usage for usage in again.source_usage if (usage.stage, usage.source) == ("cooldown", "corpus/notes"))
    assert notes.passes == pytest.approx((32 + 24) * 0.6 / (39_999 // 32))


def test_best_fit_packing_is_a_part_per_corpus_and_length_and_is_inherited(mixed: Planned) -> None:
    plan = mixed("stages.pretrain.packing=best-fit")
    packing = [name for name, node in plan.graph.nodes.items() if node.kind == "packing"]
    assert packing == [f"{stage}/packing-32/corpus/{part}" for stage, part in _parts(plan)]
    assert {plan.graph.nodes[name].part.packing for name in _segments(plan)} == {"best-fit"}  # type: ignore[attr-defined]
    second = plan.graph.nodes["pretrain/2"]
    order = [second.inputs[f"packed:{index}"].name.removeprefix("pretrain/packing-32/") for index in range(3)]
    assert order == [read.name for read in corpora(plan.graph, "second")]
    finish(plan, metrics={"rows": 1255, "share/padding": 0.004, "share/cropped": 0.25, "share/cropped_by_windows": 0.75})
    again = mixed("stages.pretrain.packing=best-fit")
    assert {step.action for step in again.steps.values()} == {"reuse"}
    assert {usage.sequences for usage in again.source_usage} == {1255}
    told = "1,255 rows with 0.40% padding; 25.0% of the tokens are in documents that are cut, 75.0% would be if they were concatenated"
    assert f"pretrain/packing-32/corpus/sums: {told}" in again.graph.notes


def _parts(plan: Plan) -> list[tuple[str, str]]:
    by_main = [read.name.removeprefix("corpus/") for read in corpora(plan.graph, "main")]
    return [*(("pretrain", part) for part in [*by_main, "sums"]), *(("cooldown", part) for part in by_main)]
