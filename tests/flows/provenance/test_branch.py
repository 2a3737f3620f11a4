"""A branch shares everything before its point, takes over what was left, and is a file that people can
read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.planning.plan import Plan, make
from flows.provenance.branch import Made, branch
from infra.store import Store
from infra.store.writing.retention import referred_steps
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.training import Precision, Segment
from tests.flows.conftest import finish
from tests.machine import slow
from tests.recipes import CHAT, RECIPE, write_recipe

ROOT = Path(__file__).parents[3]
Planned = Callable[..., Plan]


def plan_of(made: Made, store: Store) -> Plan:
    return make(load(made.path), store)


def segment(plan: Plan, name: str) -> Segment:
    part = plan.graph.nodes[name].part
    assert isinstance(part, Segment)
    return part


def test_a_branch_of_a_finished_run_reuses_what_comes_before_and_runs_what_comes_behind(
    branched: Callable[..., Made], planned: Planned, store: Store
) -> None:
    finish(planned())
    made = branched("pretrain@step=12")
    plan = plan_of(made, store)
    actions = {name: step.action for name, step in plan.steps.items()}
    before = ["tokenizer", "corpus/notes", "main", "second", "pretrain/1", "pretrain/2", "pretrain/3"]
    assert actions == dict.fromkeys(before, "reuse") | dict.fromkeys(
        ["other", "cooldown", "evaluate", "export"], "run"
    )
    assert (made.shared, made.new, made.stored) == (before, ["other", "cooldown", "evaluate", "export"], 7)
    original = planned().graph.nodes
    assert all(plan.graph.nodes[name].fingerprint == original[name].fingerprint for name in before)
    parent = plan.graph.nodes["other"].inputs["parent"]
    assert (parent.node, parent.step) == ("pretrain/2", 12)
    assert plan.graph.nodes["cooldown"].inputs["parent"].node == "other"


def test_the_published_excursion_to_float8_is_a_branch(tmp_path: Path) -> None:
    """docs/recipes.md: 300B tokens from 8T on, at 8,790 tokens a second and GPU."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    (command,) = re.findall(r"^    apertus (branch .*?)$(?! {8})", page.replace("\\\n", ""), re.M)
    _, spec, point, _, name, *options = shlex.split(command)
    store = Store.open(str(tmp_path / "store"))
    made = branch(
        str(ROOT / spec), point, name, options[1::2], tmp_path / "float8.yaml", str(tmp_path / "store")
    )
    plan = plan_of(made, store)
    excursion = segment(plan, "float8")
    assert excursion.precision == Precision(param="bfloat16", linear="float8")
    assert excursion.carry == ["weights", "optimizer", "data"]
    estimate = plan.estimates.stages["float8"].to_json()
    assert estimate["tokens"] == pytest.approx(300e9, rel=1e-4)
    assert estimate["tokens"] / estimate["seconds"] / 1024 == pytest.approx(8790, rel=1e-2)
    assert segment(plan, "align").precision == Precision(param="bfloat16")


def test_a_branch_refers_to_the_stored_checkpoint_that_it_starts_from(
    branched: Callable[..., Made], planned: Planned, store: Store
) -> None:
    branched("pretrain@step=12", name="early")
    assert store.names("") == ["format.json"]  # nothing is stored that could be pruned
    finish(planned())
    made = branched("pretrain@step=12")
    path, child = planned().graph.nodes["pretrain/2"].path, plan_of(made, store).graph.nodes["other"]
    assert referred_steps(store, path) == {12}
    assert store.read_json(f"{path}/references/00000012-{child.fingerprint}.json") == {"referrer": child.path}


def test_two_branches_share_everything_upstream_and_differ_where_they_are_told_to(
    branched: Callable[..., Made], planned: Planned, store: Store
) -> None:
    finish(planned())
    one = plan_of(branched("pretrain@step=12", "stages.one.optimizer.weight_decay=0.2", name="one"), store)
    two = plan_of(branched("pretrain@step=12", "stages.two.mixture=main", name="two"), store)
    same = plan_of(branched("pretrain@step=12", name="three"), store)
    before = ["tokenizer", "corpus/notes", "main", "second", "pretrain/1", "pretrain/2", "pretrain/3"]
    assert [one.graph.nodes[name].fingerprint for name in before] == [
        two.graph.nodes[name].fingerprint for name in before
    ]
    assert (
        len(
            {
                plan.graph.nodes[name].fingerprint
                for plan, name in ((one, "one"), (two, "two"), (same, "three"))
            }
        )
        == 3
    )
    assert segment(one, "one").optimizer.weight_decay == 0.2
    assert two.graph.nodes["two"].inputs["mixture"].name == "main"


def test_what_was_left_is_taken_over_border_by_border(branched: Callable[..., Made], store: Store) -> None:
    # 16 steps of 32 tokens: mixture `second` from step 8, a batch of 8 in place of 4 from step 12, a warm-up
    # of 4 steps to 1e-2
    plan = plan_of(branched("pretrain@step=2"), store)
    names = [node.name for node in plan.graph.segments("other")]
    assert names == ["other/1", "other/2", "other/3"]
    facts = [
        (
            plan.graph.nodes[name].start_step,
            plan.graph.nodes[name].end_step,
            segment(plan, name).global_batch_size,
        )
        for name in names
    ]
    assert facts == [(0, 6, 4), (6, 10, 4), (10, 14, 8)]
    assert [plan.graph.nodes[name].inputs["mixture"].name for name in names] == ["main", "second", "second"]
    assert segment(plan, "other/1").sample_offset == 8  # 2 steps of 4 were drawn from `main`
    original = make(load(str(Path(store.root).parent / "tiny.yaml")), store).graph.trajectories["pretrain"]
    new = plan.graph.trajectories["other"]
    assert [new.lr_at(step) for step in range(15)] == pytest.approx(
        [original.lr_at(step + 2) for step in range(15)], rel=1e-9
    )
    assert segment(plan, "other/1").carry == ["weights", "optimizer", "data"]
    assert new.optimizer == original.optimizer


@pytest.mark.parametrize(
    ("schedule", "step"),
    [
        ("{decay: linear, decay_over: 6 steps, final: 0.2}", 9),  # before the decay
        ("{decay: 1-sqrt, decay_over: 6 steps, final: 0.2}", 9),
        ("{decay: linear, decay_over: 6 steps, final: 0.2}", 13),  # inside it
        ("{decay: linear, final: 0.05}", 9),  # over the whole stage
        ("{decay: 1-sqrt, decay_over: 6 steps, final: 0.2}", 13),
        ("{warmup: 4 steps, decay: cosine, decay_over: 6 steps}", 2),
    ],
)
def test_the_learning_rate_goes_on_as_it_would_have(
    recipe: Path, store: Store, branched: Callable[..., Made], schedule: str, step: int
) -> None:
    recipe.write_text(
        recipe.read_text()
        .replace("schedule: {warmup: 4 steps}", f"schedule: {schedule}")
        .replace("{0 steps: 4, 12 steps: 8}", "4")
    )
    made = branched(f"pretrain@step={step}")
    old = make(load(recipe), store).graph.trajectories["pretrain"]
    new = plan_of(made, store).graph.trajectories["other"]
    assert new.steps == 16 - step
    assert [new.lr_at(index) for index in range(new.steps)] == [
        old.lr_at(step + index) for index in range(new.steps)
    ]
    assert made.notes == []


def test_what_is_behind_the_point_and_not_trained_yet_is_left_out(
    branched: Callable[..., Made], planned: Planned, store: Store
) -> None:
    plan = planned("stages.pretrain.checkpoint.milestones=[10]")
    finish(plan, "tokenizer", "corpus/notes", "main", "second", "pretrain/1")
    finish(plan, "pretrain/2", until=10)
    made = branched("pretrain@step=10")
    assert "stop_at: 10 steps # not trained to its end, step 16" in made.text
    after = plan_of(made, store)
    assert [node.name for node in after.graph.of("pretrain")] == ["pretrain/1", "pretrain/2"]
    assert after.graph.nodes["pretrain/2"].fingerprint == plan.graph.nodes["pretrain/2"].fingerprint
    assert (after.steps["pretrain/2"].action, after.steps["pretrain/2"].resume_step) == ("resume", 10)


@pytest.mark.parametrize(
    ("point", "overrides", "message"),
    [
        ("pretrian@step=3", [], r"there is no stage 'pretrian'\. Fix: did you mean 'pretrain'"),
        ("corpus/notes", [], "'corpus' is a corpus, which has no training to continue"),
        ("pretrain@step=17", [], "lies outside stage 'pretrain', which has 16 steps"),
        (
            "pretrain@last",
            [],
            (
                r"'pretrain@step=16' is the end of 'pretrain': nothing of its budget is left. Fix: state one,"
                r" such as 1000 steps"
            ),
        ),
        (
            "pretrain@step=12",
            ["stages.other.budgte=3 steps"],
            r"other\.yaml:\d+: stages\.other\.budgte: there is no field 'budgte' here",
        ),
        (
            "pretrain@step=12",
            ["stages.othr.budget=3 steps"],
            r"there is no stage 'othr'\. Fix: did you mean 'other'",
        ),
        (
            "pretrain@step=12",
            ["stages.other.mixture=nothing"],
            r"other\.yaml:\d+: stages\.other\.mixture.*there is no stage 'nothing'",
        ),
        (
            "pretrain@step=12",
            ["stages.corpus.seed=1"],
            r"'corpus/notes' would change \(seed\), and a branch shares everything before",
        ),
        ("pretrain@step=12", ["stages.main.seed=1"], "'main' would change"),
        ("pretrain@step=12", ["name=x"], "a branch states its own name"),
        (
            "pretrain@step=12",
            ["stages.other.optimizer.name=adamw"],
            r"other\.yaml:.*the states to carry are those of ademamix",
        ),
    ],
)
def test_a_branch_that_cannot_be_is_refused_with_its_place_and_nothing_is_written(
    branched: Callable[..., Made], recipe: Path, point: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        branched(point, *overrides)
    assert not (recipe.parent / "other.yaml").exists()


def test_a_step_that_was_not_kept_is_refused_with_those_that_were(
    branched: Callable[..., Made], planned: Planned
) -> None:
    finish(planned())
    with pytest.raises(
        SpecError, match=r"pretrain@step=9: step 9 of 'pretrain' was not kept; kept are 8, 12, 16"
    ):
        branched("pretrain@step=9")


def test_a_branch_changes_data_optimizer_length_batch_and_carries_what_it_says(
    branched: Callable[..., Made], store: Store
) -> None:
    made = branched(
        "pretrain@last",
        "stages.new={kind: mixture, weights: {corpus/notes: 1}, seed: 5, max_repetition: 100}",
        "stages.other.mixture=new",
        "stages.other.budget=5 steps",
        "stages.other.optimizer={name: adamw, lr: 1e-3}",
        "stages.other.carry=[weights]",
        "stages.other.sequence_length=64",
        "stages.other.global_batch_size=2",
    )
    plan = plan_of(made, store)
    part = segment(plan, "other")
    assert (part.optimizer.name, part.optimizer.lr, part.carry) == ("adamw", 1e-3, ["weights"])
    assert (part.sequence_length, part.global_batch_size, plan.graph.nodes["other"].steps) == (64, 2, 5)
    assert plan.graph.nodes["other"].inputs["mixture"].name == "new"


@pytest.fixture
def chat(tmp_path: Path, store: Store) -> Path:
    return write_recipe(tmp_path, CHAT)


@pytest.mark.parametrize(("step", "segments"), [(8, [(16, 4), (32, 8)]), (12, [(32, 8)])])
def test_a_branch_at_the_end_of_a_segment_begins_behind_a_border_that_is_stated_in_tokens(
    recipe: Path, store: Store, step: int, segments: list[tuple[int, int]]
) -> None:
    # borders at 1,050 and 1,600 tokens are floored to steps 8 and 12, at 1,024 and 1,536 tokens; 26 and 64
    # tokens are less than a step
    text = recipe.read_text().replace(
        "{0 steps: main, 8 steps: second}", "{0 tokens: main, 1_050 tokens: second}"
    )
    recipe.write_text(text.replace("{0 steps: 4, 12 steps: 8}", "{0 tokens: 4, 1_600 tokens: 8}"))
    plan = make(load(recipe), store)
    finish(plan)
    assert [node.end_step for node in plan.graph.segments("pretrain")] == [8, 12, 16]
    new = plan_of(branch(str(recipe), f"pretrain@step={step}", "other", [], store=store.url), store)
    assert [
        (segment.end_sample - segment.start_sample, segment.batch)
        for segment in new.graph.trajectories["other"].segments
    ] == segments
    assert {segment.mixture for segment in new.graph.trajectories["other"].segments} == {"second"}


def test_the_branch_that_the_pages_show_starts_from_what_a_finished_run_of_the_miniature_keeps(
    tmp_path: Path,
) -> None:
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "docs/operations.md"))
    (point, name, override), other = re.findall(
        r"apertus branch \S+ (\S+) --name (\S+) --set ([^\s`]+)", pages
    )
    assert point == other[0]
    recipe = tmp_path / "mini.yaml"
    recipe.write_text((ROOT / "specs/recipes/mini.yaml").read_text())
    store = Store.open(str(tmp_path / "store"))
    store.initialise()
    plan = make(load(recipe), store)
    finish(plan, *(node.name for node in plan.graph.of("pretrain")))
    made = branch(str(recipe), point, name, [override], store=store.url)
    assert {
        step.action for part, step in plan_of(made, store).steps.items() if part.startswith("pretrain/")
    } == {"reuse"}


def test_a_phase_of_a_chain_resumes_with_the_phases_after_it(chat: Path, store: Store) -> None:
    made = branch(str(chat), "longer/1@step=3", "other", [], store=store.url)
    plan = plan_of(made, store)
    assert [(node.name, node.steps) for node in plan.graph.of("other")] == [("other/1", 1), ("other/2", 3)]
    old = make(load(chat), store).graph.trajectories
    new = plan.graph.trajectories
    assert new["other/1"].lr_at(0) == old["longer/1"].lr_at(3)
    assert new["other/2"].model == old["longer/2"].model
    assert plan.graph.nodes["sft"].inputs["parent"].node == "other/2"


def test_what_names_a_later_step_names_it_in_the_branch_and_an_earlier_one_stays(
    tmp_path: Path, store: Store
) -> None:
    text = (
        RECIPE + "  early: {{kind: evaluate, from: pretrain@step=8, sources: [corpus/notes]}}\n"
        "  late: {{kind: evaluate, from: pretrain@step=14, sources: [corpus/notes], after: [pretrain]}}\n"
    )
    made = branch(str(write_recipe(tmp_path, text)), "pretrain@step=12", "other", [], store=store.url)
    plan = plan_of(made, store)
    early, late = (plan.graph.nodes[name].inputs["checkpoint"] for name in ("early", "late"))
    assert (early.node, early.step) == ("pretrain/2", 8) or (early.node, early.step) == ("pretrain/1", 8)
    assert (late.node, late.step) == ("other", 2)
    assert plan.graph.after["late"] == ("other",)


def test_a_variant_of_a_matrix_is_branched_and_its_readers_follow(tmp_path: Path, store: Store) -> None:
    text = RECIPE.replace(
        "  cooldown:\n    kind: cooldown\n",
        "  cooldown:\n    matrix: {{low: {{optimizer: {{lr: 1e-3}}}}, high: {{optimizer: {{lr: 2e-3}}}}}}\n  "
        "  kind: cooldown\n",
    )
    text = text.replace("    from: cooldown\n", "    from: cooldown-low\n").replace(
        "from: cooldown, after", "from: cooldown-low, after"
    )
    path = write_recipe(tmp_path, text)
    made = branch(str(path), "cooldown-low@step=4", "other", [], store=store.url)
    plan = plan_of(made, store)
    assert plan.graph.nodes["other"].inputs["parent"].node == "cooldown-low"
    assert plan.graph.nodes["export"].inputs["checkpoint"].node == "other"
    # all variants read it: stated once, for the matrix
    both = branch(str(path), "pretrain@step=12", "more", [], store=store.url)
    assert "  cooldown:\n    from: more # was pretrain\n" in both.text
    after = plan_of(both, store)
    assert {after.graph.nodes[name].inputs["parent"].node for name in ("cooldown-low", "cooldown-high")} == {
        "more"
    }


@pytest.mark.parametrize(
    ("recipe", "stage"),
    [
        *((name, "pretrain") for name in ("apertus-8b", "mini", "smoke")),
        slow("apertus-70b", "pretrain"),
        *(slow("apertus-1.5b-100b", f"pretrain-{name}") for name in ("baseline", "xielu")),
        ("apertus-1.5b-100b", "pretrain-apertus"),
        ("continue-pretrain", "continue"),
        ("goldfish-mini", "pretrain-goldfish"),
        ("wso-mini", "base-wso"),
        slow("wso-mini", "base-cosine-0.1"),
        slow("optimizer-consistency-mini", "base-muon"),
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
    assert other.segments[0].schedule.peak == 1e-5
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
            found.append(
                (part.schedule.lr(part.tokens_at(step)), settings, data, behind, part.sample_at(step))
            )
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
    recipe: Path, store: Store, branched: Callable[..., Made], edited: str
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
