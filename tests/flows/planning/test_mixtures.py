"""Mixtures as the planner sees them: mixtures of mixtures, sizes, annealing, exclusion, and what the
sources can give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.planning.graph import Graph, Input, Node
from flows.planning.mixtures import corpora, limits, shares
from flows.planning.parts.builder import reads
from flows.planning.plan import Plan
from specs.errors import SpecError
from specs.launch import Launch
from specs.stages.mixture import MixturePart
from tests.flows.conftest import finish
from tests.flows.planning.mixing import MAIN, TOKENS, shares_of

Planned = Callable[..., Plan]


def test_nested_mixture_resolves_to_shares_of_corpora(mixed: Planned) -> None:
    plan = mixed()
    assert shares_of(plan, "main") == {"corpus/notes": 0.6, "corpus/pages": 0.4}
    assert shares_of(plan, "second") == pytest.approx(
        {"corpus/notes": 0.42, "corpus/pages": 0.28, "corpus/sums": 0.3}
    )
    assert sorted(plan.graph.nodes["pretrain/2"].part.source_names) == sorted(TOKENS)  # type: ignore[attr-defined]
    assert plan.graph.parents(plan.graph.nodes["second"]) != plan.graph.parents(plan.graph.nodes["main"])


levels = st.lists(
    st.dictionaries(st.integers(0, 9), st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5
)


@given(levels)
def test_shares_of_nested_mixtures_are_sums_over_all_paths(chosen: list[dict[int, int]]) -> None:
    graph = Graph()
    nodes = [
        _node(graph, f"corpus{number}", MixturePart(weights=[], seed=number), {}, "corpus")
        for number in range(3)
    ]
    for number, weights in enumerate(chosen):
        merged: dict[int, int] = {}
        for pick, weight in weights.items():
            merged[pick % len(nodes)] = merged.get(pick % len(nodes), 0) + weight
        inputs = {f"source:{index}": reads(nodes[pick]) for index, pick in enumerate(merged)}
        nodes.append(
            _node(
                graph,
                f"mixture{number}",
                MixturePart(weights=list(merged.values()), seed=7),
                inputs,
                "mixture",
            )
        )

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
    second = (
        "  second: {kind: mixture, proportional: {corpus/notes: 1, corpus/sums: 3}, max_repetition: 100}\n"
    )
    assert shares_of(mixed(second=second), "second") == {"corpus/notes": 0.25, "corpus/sums": 0.75}
    plain = mixed(
        second="  second: {kind: mixture, proportional: [corpus/notes, corpus/sums], max_repetition: 100}\n"
    )
    finish(plain)
    passes = {
        usage.source: usage.passes
        for usage in mixed(second=plain_second()).source_usage
        if usage.stage == "pretrain"
    }
    assert passes["corpus/sums"] == pytest.approx((4 * 4 + 4 * 8) / 2 / (39_999 // 32))


def plain_second() -> str:
    return "  second: {kind: mixture, proportional: [corpus/notes, corpus/sums], max_repetition: 100}\n"


def test_limit_of_a_weight_wins_over_inner_mixtures(mixed: Planned) -> None:
    plan = mixed(
        second="  second: {kind: mixture, weights: {main: 1, corpus/sums: {weight: 1, max_repetition: 7}}}\n"
    )
    names = {node.fingerprint: node.name for node in plan.graph.nodes.values()}
    found = {names[corpus]: limit for corpus, limit in limits(plan.graph, plan.pipeline, "second").items()}
    assert found == {"corpus/notes": 100, "corpus/pages": 100, "corpus/sums": 7}
    plan = mixed(
        second=(
            "  second: {kind: mixture, weights: {main: {weight: 1, max_repetition: 9}, corpus/notes: 1},"
            " max_repetition: 5}\n"
        )
    )
    assert {
        names[corpus]: limit for corpus, limit in limits(plan.graph, plan.pipeline, "second").items()
    } == {
        "corpus/notes": 5,
        "corpus/pages": 9,
    }


def test_an_anneal_that_does_not_fit_is_refused(mixed: Planned) -> None:
    main = (
        "  main: {kind: mixture, weights: {corpus/notes: 1}, anneal: {to: {corpus/pages: 1}, over: STEPS,"
        " pieces: 3}}\n"
    )
    with pytest.raises(SpecError, match=r"'main' is annealed over 9 steps, 1,024 tokens are trained on it"):
        mixed(main=main.replace("STEPS", "9 steps"))
    with pytest.raises(SpecError, match=r"3 pieces over 2 steps, which is less than a batch for each"):
        mixed(main=main.replace("STEPS", "2 steps"))


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
        (
            "{weights: {main: 1}, exclude: [pretrain@step=3]}",
            "exclude names stages as a whole; write 'pretrain'",
        ),
        (
            "{proportional: [corpus/notes], anneal: {to: {main: 1}, over: 8 steps}}",
            "anneal goes from weights to weights",
        ),
    ],
)
def test_a_wrong_mixture_is_refused_with_the_fix(mixed: Planned, second: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        mixed(second=f"  second: {second.replace('{', '{kind: mixture, ', 1).replace(', }', '}')}\n")


def test_annealed_mixture_is_refused_inside_another(mixed: Planned) -> None:
    main = MAIN.replace(
        "max_repetition", "anneal: {to: {corpus/pages: 1}, over: 4 steps, pieces: 2}, max_repetition"
    )
    with pytest.raises(SpecError, match="mixture 'main' is annealed"):
        mixed(main=main)
