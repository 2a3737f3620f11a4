"""What weights are learned of, and the mixtures that draw by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from flows.planning.mixtures import corpora, learned_in, shares
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.domain_weights import DomainWeightsSegment
from specs.stages.mixture import MixturePart
from tests.flows.comparing import changed
from tests.flows.conftest import finish
from tests.recipes import write_recipe
from tests.specs.stages.test_domain_weights import LEARNED

MEAN = {"corpus/notes": 0.75, "corpus/pages": 0.25}


def planned(tmp_path: Path, store: Store, *overrides: str) -> Plan:
    return make(load(write_recipe(tmp_path, LEARNED), overrides), store)


def shares_of(plan: Plan, name: str) -> dict[str, float]:
    names = {read.fingerprint: read.name for read in corpora(plan.graph, name)}
    found = shares(plan.graph, name, lambda node: 1, learned_in(plan.store))
    return {names[fingerprint]: float(share) for fingerprint, share in found.items()}


def learn(plan: Plan) -> None:
    """Finishes the proxy, as if it had found `MEAN`."""
    node = plan.graph.nodes["proxy"]
    part = cast(DomainWeightsSegment, node.part)
    names = [part.source_names[source] for source in part.weighted]
    facts: dict[str, Any] = {"domain_weights": {"mean": [MEAN[name] for name in names]}}
    finish(plan, "thirds", "proxy", facts=facts)


def test_targets_have_no_weight_whatever_the_order_of_names(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store)
    part = cast(DomainWeightsSegment, plan.graph.nodes["proxy"].part)
    assert [part.source_names[target] for target in part.targets] == ["corpus/sums"]
    assert sorted(part.source_names[source] for source in part.weighted) == ["corpus/notes", "corpus/pages"]
    turned = "stages.thirds.weights={corpus/sums: 2, corpus/pages: 2, corpus/notes: 2}"
    assert not changed(plan, planned(tmp_path, store, turned))
    other = ("stages.proxy.targets=[corpus/pages]", "stages.swapped.learned.sources=null")
    assert "proxy" in changed(plan, planned(tmp_path, store, *other))
    assert "learned" in changed(plan, planned(tmp_path, store, "stages.proxy.update.mu=0.02"))
    longer = changed(plan, planned(tmp_path, store, "stages.proxy.budget=12 steps"))
    assert {"learned", "swapped", "large"} <= longer and "proxy" not in longer


def test_weights_are_equal_until_they_are_known_and_then_follow_names(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store)
    assert shares_of(plan, "learned") == {"corpus/notes": 0.5, "corpus/pages": 0.5}
    assert plan.graph.plan_depends_on(plan.graph.nodes["proxy"], plan.pipeline)
    learn(plan)
    after = planned(tmp_path, store)
    assert not changed(plan, after)
    assert shares_of(after, "learned") == MEAN
    assert shares_of(after, "swapped") == {"corpus/notes": 0.25, "corpus/sums": 0.75}
    drawn = {usage.source: usage.tokens for usage in after.source_usage if usage.stage == "large"}
    assert drawn == {"corpus/notes": 8 * 4 * 32 * 0.75, "corpus/pages": 8 * 4 * 32 * 0.25}
    (proxy,) = {usage.tokens for usage in after.source_usage if usage.stage == "proxy"}
    assert proxy == 8 * 2 * 32


def test_more_passes_than_allowed_are_refused_when_weights_are_known(tmp_path: Path, store: Store) -> None:
    """40,000 tokens are 1,249 windows: of 3,200 samples, a half is 1.3 passes, three quarters are 1.9."""
    override = ("stages.learned.max_repetition=1.5", "stages.large.budget=800 steps")
    finish(planned(tmp_path, store), "tokenizer", "corpus/notes", "corpus/pages", "corpus/sums")
    learn(planned(tmp_path, store, *override))
    with pytest.raises(SpecError, match=r"'large' draws .* from 'corpus/notes' through mixture 'learned'"):
        planned(tmp_path, store, *override)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            ["stages.proxy.targets=[corpus/notes, corpus/pages]"],
            "2 of 3 sources are targets, so fewer than two have a weight",
        ),
        (
            ["stages.proxy.global_batch_size=2"],
            "stages.proxy.global_batch_size: a batch of 2 sequences is not possible: every step needs equally"
            " many sequences of each of 3 sources. Fix: use a multiple of 3.",
        ),
        (
            ["stages.proxy.launch.processes=2", "stages.proxy.global_batch_size=8"],
            "of each of 3 sources on each of 2 data-parallel processes. Fix: use a multiple of 6.",
        ),
        (
            ["stages.thirds.weights={corpus/notes: 1, corpus/pages: 1}"],
            "stages.proxy.targets[0]: target 'corpus/sums' is not a source of mixture 'thirds'. Fix:",
        ),
        (
            ["stages.thirds.weights={corpus/notes: 1, corpus/pages: 1, corpus/sums: 2}"],
            "mixture 'thirds' does not draw equally from its sources; 'proxy' does",
        ),
        (
            ["stages.thirds={kind: mixture, proportional: [corpus/notes, corpus/pages, corpus/sums]}"],
            "mixture 'thirds' does not draw equally from its sources; 'proxy' does",
        ),
        (
            ["stages.swapped.learned.sources={corpus/notes: corpus/sums}"],
            "stages.swapped.learned.sources.corpus/notes: 'proxy' learns no weight for 'corpus/sums'. Fix:",
        ),
    ],
)
def test_what_cannot_be_learned_is_refused(
    tmp_path: Path, store: Store, override: list[str], told: str
) -> None:
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, store, *override)
    assert told in str(caught.value)


def test_a_mixture_part_states_positions_alone(tmp_path: Path, store: Store) -> None:
    node = planned(tmp_path, store).graph.nodes["swapped"]
    part = cast(MixturePart, node.part)
    assert part.weights == [1, 1] and sorted(part.learned) == [0, 1]
    assert (node.inputs["learned"].name, node.inputs["learned"].step) == ("proxy", 8)
    assert "learned" not in planned(tmp_path, store).graph.nodes["main"].identity
