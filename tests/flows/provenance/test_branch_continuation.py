"""A branch without changes does in every step what its stage would have done, and has its fingerprints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.planning.plan import Plan, make
from flows.provenance.branch import Branch, branch
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.training import Segment
from tests.flows.provenance.branches import plan_of, segment
from tests.machine import slow
from tests.recipes import CHAT, write_recipe

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("recipe", "stage"),
    [
        *((name, "pretrain") for name in ("apertus-8b", "smoke")),
        *(slow(name, "pretrain") for name in ("apertus-70b", "mini")),
        *(slow("apertus-1.5b-100b", f"pretrain-{name}") for name in ("baseline", "xielu")),
        ("apertus-1.5b-100b", "pretrain-apertus"),
        ("continue-pretrain", "continue"),
        ("goldfish-mini", "pretrain-goldfish-28"),
        slow("wso-mini", "base-wso-28-4e-3"),
        slow("wso-mini", "base-linear-0-28-4e-3"),
        slow("optimizer-consistency-mini", "base-muon-28"),
        slow("apertus-8b", "sft"),
    ],
)
@pytest.mark.parametrize("share", [0.3, slow(0.9)])
def test_a_recipe_of_the_project_is_branched_in_the_middle(
    recipe: str, stage: str, share: float, tmp_path: Path, store: Store
) -> None:
    """Their maps of batches and mixtures, models and optimizers are variables, which a branch that ends
    its stage early replaces."""
    file = str(ROOT / f"specs/recipes/{recipe}.yaml")
    trajectory = make(load(file), store).graph.trajectories[stage]
    step = round(trajectory.steps * share)
    made = branch(
        file,
        f"{stage}@step={step}",
        "other",
        ["stages.other.optimizer.lr=1e-5"],
        tmp_path / "other.yaml",
        store.url,
    )
    plan = plan_of(made, store)
    other = plan.graph.trajectories["other"]
    assert other.tokens_at(other.steps) == trajectory.tokens_at(trajectory.steps) - trajectory.tokens_at(step)
    assert other.settings.optimizer.lr == 1e-5
    assert other.segments[-1].batch == trajectory.segments[-1].batch
    assert other.segments[-1].mixture == trajectory.segments[-1].mixture
    assert plan.graph.segments("other")[0].inputs["parent"].step == step
    own = {node.name for node in plan.graph.segments("other")}
    readers = [
        name
        for name, node in plan.graph.nodes.items()
        for read in node.inputs.values()
        if read.node in own and name not in own
    ]
    assert readers or any("read" in note and "as before" in note for note in made.notes)


POSITION = {"schedule", "start_step", "start_tokens", "sample_offset", "excluded", "seed", "carry"}


def each_step(plan: Plan, names: list[str]) -> list[tuple[object, ...]]:
    """Of every step of training parts: learning rate, all other settings, the data and the place in them."""
    found = []
    for name in names:
        node, part = plan.graph.nodes[name], segment(plan, name)
        settings = {field: value for field, value in part.identity_fields().items() if field not in POSITION}
        data = {
            role: read.fingerprint
            for role, read in node.inputs.items()
            if role != "parent" and not role.startswith("excluded")
        }
        behind = {
            node.inputs[f"excluded:{index}"].fingerprint: samples
            for index, samples in enumerate(part.excluded)
        }
        for step in range(node.start_step or 0, node.end_step or 0):
            found.append((part.lr_at(step), settings, data, behind, part.sample_at(step)))
    return found


def training(plan: Plan, stage: str) -> list[str]:
    return [node.name for node in plan.graph.of(stage) if isinstance(node.part, Segment)]


MORE = '  more: {{url: "{documents}", format: text, include: ["note-0*.txt"]}}\n'
SECOND = (
    "weights: {{corpus/notes: 1, corpus/more: 3}}, anneal: {{to: {{corpus/notes: 1}}, over: 6 steps,"
    " pieces: 3}}"
)
VARIED = CHAT.replace("sources:\n", f"sources:\n{MORE}", 1)
VARIED = VARIED.replace(
    "sources: {{notes: {{holdout: 0.2}}}}}}", "sources: {{notes: {{holdout: 0.2}}, more: {{}}}}}}"
)
VARIED = VARIED.replace(
    "second: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100, seed: 29}}",
    f"second: {{{{kind: mixture, {SECOND}, exclude: [pretrain], max_repetition: 100}}}}",
)
VARIED = VARIED.replace(
    "conversations: chat\n", "conversations: chat\n    data_seed: 5\n    anomalies: {{nonfinite: skip}}\n"
)
VARIED = VARIED.replace(
    "mixture: main\n    budget: 6 steps\n", "mixture: main\n    budget: 6 steps\n    goldfish: null\n"
)


def test_a_branch_of_fine_tuning_continues_after_the_conversations_that_were_drawn(
    tmp_path: Path, store: Store
) -> None:
    recipe = write_recipe(tmp_path, VARIED)
    branched = plan_of(branch(str(recipe), "sft@step=3", "later", [], store=store.url), store)
    original = make(load(recipe), store)
    assert each_step(branched, training(branched, "later")) == each_step(original, ["sft"])[3:]


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(
        [("pretrain", 16), ("cooldown", 6), ("longer/1", 4), ("longer/2", 3), ("sft", 8)]
    ).flatmap(lambda stage: st.tuples(st.just(stage[0]), st.integers(1, stage[1] - 1)))
)
def test_a_branch_without_changes_does_in_every_step_what_the_stage_would_have_done(
    tmp_path: Path, store: Store, point: tuple[str, int]
) -> None:
    phase, step = point
    recipe = write_recipe(tmp_path, VARIED)
    name = f"{phase.replace('/', '-')}-{step}"
    original = make(load(recipe), store)
    branched = plan_of(branch(str(recipe), f"{phase}@step={step}", name, [], store=store.url), store)
    before = sum(original.graph.trajectories[other].steps for other in ["longer/1"] if phase == "longer/2")
    assert any(read.startswith("excluded") for read in original.graph.nodes["pretrain/2"].inputs)
    expected = each_step(original, training(original, phase.split("/")[0]))[before + step :]
    assert each_step(branched, training(branched, name)) == expected


def test_preference_training_is_branched_from_the_model_of_its_preferences_only(
    chat: Path, store: Store
) -> None:
    with pytest.raises(
        SpecError,
        match="'preferences' was made with step 8 of 'sft', but this stage starts from 'qrpo@step=2'",
    ):
        branch(str(chat), "qrpo@step=2", "other", [], store=store.url)
    assert not (chat.parent / "other.yaml").exists()


LATER = {  # edits of the parent after step 9: segments of the branch at step 5 whose work changes
    "budget: 16 steps": ("budget: 20 steps", []),
    "12 steps: 8": ("13 steps: 8", [2]),
    "8 steps: second": ("10 steps: second", [1, 2]),
    "{warmup: 4 steps}": ("{warmup: 4 steps, decay: linear, decay_over: 3 steps}", [3]),
}


@pytest.mark.parametrize("edited", LATER)
def test_fingerprints_of_a_branch_follow_the_rest_of_the_parent_only_where_that_changes(
    recipe: Path, store: Store, branched: Callable[..., Branch], edited: str
) -> None:
    """Segments of the branch: steps 5 to 8 on `main`, 8 to 12 on `second`, from 12 on with a batch of 8."""
    stated = ["mixture=main", "global_batch_size=4", "budget=3 steps", "schedule={decay: none}"]
    rest, own = (
        branched("pretrain@step=5"),
        branched("pretrain@step=5", *(f"stages.own.{one}" for one in stated), name="own"),
    )
    before, stable = plan_of(rest, store), plan_of(own, store)
    text = recipe.read_text()
    replacement, changed = LATER[edited]
    assert edited in text
    recipe.write_text(text.replace(edited, replacement))
    after = plan_of(rest, store)
    names = [node.name for node in after.graph.segments("other")]
    differing = [
        index
        for index, name in enumerate(names)
        if name not in before.graph.nodes
        or before.graph.nodes[name].fingerprint != after.graph.nodes[name].fingerprint
    ]
    assert differing == changed
    assert plan_of(own, store).graph.nodes["own"].fingerprint == stable.graph.nodes["own"].fingerprint
