"""A branch shares everything before its point, takes over what was left, and is a file that people can
read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from flows.provenance.branch import Branch, branch
from infra.store import Store
from infra.store.writing.retention import referred_steps
from specs.errors import SpecError
from specs.recipe import load
from specs.settings import Precision
from tests.flows.conftest import finish
from tests.flows.provenance.branches import plan_of, segment
from tests.recipes import RECIPE, write_recipe

ROOT = Path(__file__).parents[3]
Planned = Callable[..., Plan]


def test_a_branch_of_a_finished_run_reuses_the_parts_before_its_point_and_runs_the_rest(
    branched: Callable[..., Branch], planned: Planned, store: Store
) -> None:
    finish(planned())
    made = branched("pretrain@step=12")
    plan = plan_of(made, store)
    actions = {name: step.action for name, step in plan.steps.items()}
    before = ["tokenizer", "corpus/notes", "main", "second", "pretrain/1", "pretrain/2", "pretrain/3"]
    assert actions == dict.fromkeys(before, "reuse") | dict.fromkeys(
        ["other", "cooldown", "evaluate", "export"], "run"
    )
    assert (made.shared, made.parts, made.stored) == (before, ["other", "cooldown", "evaluate", "export"], 7)
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
    branched: Callable[..., Branch], planned: Planned, store: Store
) -> None:
    branched("pretrain@step=12", name="early")
    assert store.names("") == ["format.json"]  # nothing is stored that could be pruned
    finish(planned())
    made = branched("pretrain@step=12")
    path, child = planned().graph.nodes["pretrain/2"].path, plan_of(made, store).graph.nodes["other"]
    assert referred_steps(store, path) == {12}
    assert store.read_json(f"{path}/references/00000012-{child.fingerprint}.json") == {"referrer": child.path}


def test_two_branches_share_everything_upstream_and_differ_where_they_are_told_to(
    branched: Callable[..., Branch], planned: Planned, store: Store
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


def test_a_branch_takes_over_the_remaining_breakpoints_of_its_parent(
    branched: Callable[..., Branch], store: Store
) -> None:
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
    assert new.settings.optimizer == original.settings.optimizer


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
def test_the_learning_rate_of_a_branch_continues_the_parents_schedule(
    recipe: Path, store: Store, branched: Callable[..., Branch], schedule: str, step: int
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


def test_a_branch_omits_parts_after_its_point_that_are_not_trained_yet(
    branched: Callable[..., Branch], planned: Planned, store: Store
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
        ("pretrain@step=17", [], "is outside stage 'pretrain', which has 16 steps"),
        (
            "pretrain@last",
            [],
            (
                r"'pretrain@step=16' is the end of 'pretrain': nothing of its budget is left. Fix: set one,"
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
def test_an_impossible_branch_is_refused_with_line_and_reason_and_nothing_is_written(
    branched: Callable[..., Branch], recipe: Path, point: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        branched(point, *overrides)
    assert not (recipe.parent / "other.yaml").exists()


@pytest.mark.parametrize("name", ["a\0b", "", "a/b", "..", "-", "a b", "ä", "x" * 101, "a\n"])
def test_a_branch_has_the_name_of_a_stage(branched: Callable[..., Branch], recipe: Path, name: str) -> None:
    before = sorted(recipe.parent.rglob("*"))
    with pytest.raises(SpecError, match=r"--name: '.*' is no name of a stage\. Fix: use letters, digits"):
        branched("pretrain@step=12", name=name)
    assert sorted(recipe.parent.rglob("*")) == before


def test_a_step_that_was_not_kept_is_refused_with_those_that_were(
    branched: Callable[..., Branch], planned: Planned
) -> None:
    finish(planned())
    with pytest.raises(
        SpecError, match=r"pretrain@step=9: step 9 of 'pretrain' was not kept; kept are 8, 12, 16"
    ):
        branched("pretrain@step=9")


def test_a_branch_changes_data_optimizer_length_batch_and_carries_what_it_says(
    branched: Callable[..., Branch], store: Store
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


@pytest.mark.parametrize(("step", "segments"), [(8, [(16, 4), (32, 8)]), (12, [(32, 8)])])
def test_a_branch_at_the_end_of_a_segment_begins_after_a_border_stated_in_tokens(
    recipe: Path, store: Store, step: int, segments: list[tuple[int, int]]
) -> None:
    # breakpoints at 1,050 and 1,600 tokens are floored to steps 8 and 12, at 1,024 and 1,536 tokens; 26 and
    # 64 tokens are less than a step
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


def test_the_documented_branch_starts_from_a_checkpoint_that_a_finished_miniature_keeps(
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


def test_references_to_later_steps_move_to_the_branch_and_earlier_ones_stay(
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


def test_a_variant_of_a_matrix_is_branched_and_its_readers_read_the_branch(
    tmp_path: Path, store: Store
) -> None:
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
