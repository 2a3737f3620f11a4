"""The recipes of the studies: what their variants share is done once, and the published scales are those
that are stated."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import cast

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs import trainable
from specs.dependencies import order
from specs.mamba import Mamba
from specs.pipeline import Pipeline
from specs.recipe import load
from specs.resolution import resolve
from specs.stages.distill import DistillSegment
from specs.stages.evaluate import EvaluatePart
from specs.trajectory import Trajectory
from tests.flows.comparing import segment

RECIPES = Path(__file__).resolve().parents[3] / "specs/recipes"


def planned(name: str, store: Store, *overrides: str) -> Plan:
    return make(load(RECIPES / f"{name}.yaml", overrides), store)


def kinds(plan: Plan) -> dict[str, int]:
    """Parts that would really run, by kind."""
    return dict(
        Counter(node.kind for node in plan.graph.nodes.values() if node.name not in plan.graph.duplicates)
    )


def trajectories(pipeline: Pipeline) -> dict[str, Trajectory]:
    """Of what does not begin with a Hugging Face model."""
    return resolve(pipeline, order(pipeline))


def test_fine_tunings_of_a_schedule_share_its_pretraining(store: Store) -> None:
    plan = planned("wso-mini", store)
    assert {kind: count for kind, count in kinds(plan).items() if kind in ("pretrain", "cooldown")} == {
        "pretrain": 12,
        "cooldown": 6 + 6 + 3 + 3,
    }
    for seed in (28, 29, 30):
        for rate in ("4e-3", "1.2e-2"):  # WSD branches off from WSO: three quarters are the same checkpoint
            parent, wsd = f"base-wso-{seed}-{rate}", f"base-wsd-{seed}-{rate}"
            read = plan.graph.nodes[wsd].inputs["parent"]
            assert (read.name, read.step) == (parent, 150)
            assert plan.graph.trajectories[wsd].steps == 200 - 150
        flat, decayed = (plan.graph.nodes[f"mid-{arm}-best-wso-{seed}"] for arm in ("flat", "decayed"))
        assert flat.inputs == decayed.inputs and flat.inputs["parent"].name == f"best-wso-{seed}"
        read = plan.graph.nodes[f"more-wsd-{seed}"].inputs["parent"]
        assert (read.name, read.step) == (f"more-wso-{seed}", 175)


@pytest.mark.parametrize("recipe", ["wso", "wso-8b"])
def test_schedules_end_where_the_paper_says(recipe: str) -> None:
    """The share of the peak rate that is left at the end of each training before fine-tuning."""
    ends = {
        name: found.segments[-1].schedule.factor(found.tokens)
        for name, found in trajectories(load(RECIPES / f"{recipe}.yaml")).items()
        if not name.startswith(("sft-", "chosen-"))
    }
    for name, end in ends.items():
        if name.endswith(("-0.1", "-0")):
            left = float(name.rsplit("-", 1)[1])
        else:
            left = 0 if name.endswith("decayed") else 1
        assert end == pytest.approx(left, abs=1e-9), name
    assert len(ends) == {"wso": 30, "wso-8b": 15}[recipe]


@pytest.mark.parametrize("name", ["wso", "wso-8b", "wso-mini"])
def test_rates_of_fine_tuning_are_chosen_by_other_conversations_than_they_are_reported_on(
    name: str, store: Store
) -> None:
    """Every model is fine-tuned at every rate on the same conversations, and reported once."""
    plan = planned(name, store)
    nodes = plan.graph.nodes
    tuned = {stage: node for stage, node in nodes.items() if node.kind == "sft"}
    chosen = {stage for stage in nodes if stage.startswith("chosen-")}
    candidates = [read.name for stage in chosen for read in nodes[stage].inputs.values()]
    assert sorted(candidates) == sorted(tuned)
    assert len({len(nodes[stage].inputs) for stage in chosen}) == 1
    assert {node.inputs["conversations:0"].name for node in tuned.values()} == {"chat/instructions"}
    reported = [node for node in nodes.values() if node.kind == "evaluate"]
    assert sorted(node.inputs["checkpoint"].name for node in reported) == sorted(chosen)
    assert {node.inputs["source:0"].name for node in reported} == {"chat/other"}


@pytest.mark.parametrize(
    ("recipe", "tasks", "tuned"), [("", 3, 3 * 6 * (6 + 6 + 3 * 4)), ("-mini", 1, 6 * (3 + 3 + 2 * 3))]
)
def test_fine_tunings_are_compared_with_the_pretraining_that_they_come_from(
    recipe: str, tasks: int, tuned: int, store: Store
) -> None:
    plan = planned(f"optimizer-consistency{recipe}", store)
    data = {"tokenizer": 1, "corpus": 1, "mixture": 1, "conversations": tasks}
    assert kinds(plan) == data | {"pretrain": 6, "probe": 6, "sft": tuned, "evaluate": 6 + tuned}
    ranks = set()
    for name, found in plan.graph.trajectories.items():
        if name.startswith("sft-"):
            node = plan.graph.nodes[name]
            way, task, base, seed, rate = name.removeprefix("sft-lora-").removeprefix("sft-").split("-", 4)
            adapted = name.startswith("sft-lora-")
            assert (node.identity.get("lora") is not None) == adapted
            if adapted:
                assert node.identity["lora"]["rank"] == int(way)
                ranks.add(int(way))
            assert found.parent is not None
            optimizer = found.settings.optimizer
            assert (optimizer.name, optimizer.lr) == ("adamw" if adapted else way, float(rate))
            assert found.parent.phase == f"base-{base}-{seed}"
            evaluation = plan.graph.nodes[name.replace("sft", "evaluate", 1)]
            assert evaluation.inputs["against"].name == f"evaluate-base-{base}-{seed}"
            assert [evaluation.inputs[f"source:{index}"].name for index in range(2)] == [
                "corpus/text",
                f"chat/{task}",
            ]
    assert len(ranks) == (2 if recipe else 3)


def test_pretrainings_with_and_without_goldfish_differ_in_the_loss_alone(store: Store) -> None:
    plan = planned("goldfish-mini", store)
    trained = {"pretrain": 9, "export": 9, "continuations": 9, "evaluate": 9}
    assert kinds(plan) == {"tokenizer": 1, "corpus": 2, "mixture": 1, **trained}
    for seed in (28, 29, 30):
        found = [plan.graph.nodes[f"pretrain-{name}-{seed}"] for name in ("standard", "goldfish", "k4")]
        assert [part.identity.pop("goldfish", None) for part in found] == [
            None,
            {"k": 50, "h": 50},
            {"k": 4, "h": 50},
        ]
        (same,) = {
            str({name: value for name, value in part.identity.items() if name != "goldfish"})
            for part in found
        }
        assert len({part.inputs["mixture"].fingerprint for part in found}) == 1 and same


def test_students_differ_in_their_teacher_alone(store: Store) -> None:
    """With a teacher and without one; `long` has as many FLOPs as a student with its teacher."""
    plan = planned("distill-mini", store)
    data = {"tokenizer": 1, "corpus": 1, "mixture": 1}
    assert kinds(plan) == data | {"pretrain": 7, "distill": 12, "teacher_tokens": 1}
    nodes = plan.graph.nodes
    for seed in (28, 29, 30):
        alone, *taught = (
            nodes[f"student-{name}-{seed}"]
            for name in ("alone-short", "forward", "reverse", "stored", "both")
        )
        for node in taught:
            more = {"teacher", "loss", "top_k"}
            assert {
                name: value for name, value in node.identity.items() if name not in more
            } == alone.identity
        assert nodes[f"student-alone-long-{seed}"].flops == pytest.approx(taught[0].flops, rel=0.01)


def test_models_on_learned_weights_differ_in_their_mixture_alone(store: Store) -> None:
    plan = planned("domain-weights-mini", store)
    data = {"tokenizer": 1, "corpus": 4, "mixture": 1 + 12}  # one of them is that of a proxy
    assert kinds(plan) == data | {"domain_weights": 6, "pretrain": 12, "evaluate": 24}
    nodes = plan.graph.nodes
    for seed in (28, 29, 30):
        bases = [nodes[f"base-{arm}-{seed}"] for arm in ("equal", "target", "all", "permuted")]
        assert len({str(node.identity) for node in bases}) == 1
        mixtures = [nodes[node.inputs["mixture"].name] for node in bases]
        assert len({node.fingerprint for node in mixtures}) == 4
        assert {node.identity["seed"] for node in mixtures} == {seed}
        _, target, every, permuted = (node.inputs.get("learned") for node in mixtures)
        assert target is not None and every is not None and target == permuted != every
        assert mixtures[1].identity["learned"] != mixtures[3].identity["learned"]


PUBLISHED = {  # steps, tokens: as stated in the papers, or beside the number where it is ours
    "wso": {
        "base-wso": (80_000, 335_544_320_000),
        "base-wsd-0.1": (20_000, 83_886_080_000),
        "mid-wso-flat": (36_000, 150_994_944_000),
        "over-wso": (120_000, 2_013_265_920_000),
        "over-mid-wso-flat": (30_000, 503_316_480_000),
    },
    "optimizer-consistency": {"base-muon-28": (19_000, 9_961_472_000)},
    "goldfish": {"pretrain-goldfish": (168_863, 82_999_541_760)},
    "optimizer-benchmark": {"pretrain-ademamix-28-1e-3": (128_000, 16_777_216_000)},
    "ademamix-forgetting": {"before-ademamix-28-1e-3": (100_000, 6_553_600_000)},
}
LEFT_OUT = {  # figures of which a miniature can say nothing, of tasks that it does not have, or in another
    "optimizer-benchmark": ["z-loss"],
    "wso": ["fine-tuned", "over-mid-training"],
    "optimizer-consistency": ["instructions", "code", "throughout"],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_scale_is_the_one_of_the_paper(name: str) -> None:
    found = trajectories(load(RECIPES / f"{name}.yaml"))
    assert {phase: (found[phase].steps, found[phase].tokens) for phase in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_miniature_has_the_figures_of_its_study_and_states_its_limits(name: str) -> None:
    mini, whole = load(RECIPES / f"{name}-mini.yaml"), load(RECIPES / f"{name}.yaml")
    left_out = LEFT_OUT.get(name, ())
    assert [key for key in mini.figures if key in whole.figures] == [
        key for key in whole.figures if key not in left_out
    ]
    for key, figure in mini.figures.items():
        shown, silent = figure.text.split("What it is too small to show: ")
        assert shown.startswith("What it shows: ") and silent
        assert key not in whole.figures or "What it" not in whole.figures[key].text


@pytest.mark.parametrize("name", ["ademamix-forgetting", "ademamix-forgetting-mini"])
def test_a_batch_and_its_control_differ_in_one_step_that_continues_the_chosen_training(
    name: str, store: Store
) -> None:
    """Rate, states and counters go on: the step of the batch and those after it continue one training."""
    plan = planned(name, store)
    for start, seed in product(("chosen-adamw", "chosen-ademamix", "low-adamw"), (28, 29, 30)):
        run = f"{start}-{seed}"
        chosen = segment(plan, plan.graph.nodes[run].inputs["checkpoint:0"].name)
        for number in (1, 2):
            batch, other = (plan.graph.nodes[f"after-{text}-{run}/{number}"] for text in ("batch", "instead"))
            assert batch.identity == other.identity
            assert (batch.inputs["mixture"] != other.inputs["mixture"]) == (number == 1)
            part = segment(plan, batch.name)
            assert part.optimizer == chosen.optimizer
            assert part.carry == (["weights", "optimizer", "data"] if number == 1 else [])
            drawn = chosen.end_step * chosen.global_batch_size
            assert (part.start_step, part.sample_offset) == ((0, 0) if number == 1 else (1, drawn))
            rates = {part.lr_at(step) for step in (part.start_step, part.end_step - 1)}
            assert rates == {chosen.lr_at(chosen.end_step - 1)}
        assert plan.graph.nodes[f"after-batch-{run}/1"].end_step == 1


def test_the_model_of_each_round_samples_and_is_the_reference_of_the_next(store: Store) -> None:
    plan = planned("rounds-mini", store)
    nodes = plan.graph.nodes
    for seed in (28, 29, 30):
        for number, before in ((1, "sft"), (2, f"align-1-{seed}")):
            name, aligned = f"preferences-{number}-{seed}", nodes[f"align-{number}-{seed}"]
            read = [
                nodes[f"{name}/model"].inputs["checkpoint"],
                nodes[f"{name}/log_probabilities"].inputs["checkpoint"],
                aligned.inputs["parent"],
            ]
            assert {one.name for one in read} == {before} and len({one.hashed for one in read}) == 1
            assert aligned.inputs["pairs"].name == f"{name}/pairs"
        assert nodes[f"evaluate-2-{seed}/model"].inputs["checkpoint"].name == f"align-2-{seed}"
    for part in ("preferences-1-{}/completions", "align-1-{}", "align-2-{}", "evaluate-0-{}/completions"):
        assert len({nodes[part.format(seed)].fingerprint for seed in (28, 29, 30)}) == 3


@pytest.mark.parametrize(
    ("name", "arms", "trainings"),
    [("optimizer-benchmark", 12, 114), ("optimizer-benchmark-mini", 12, 108), ("ladder-mini", 7, 81)],
)
def test_every_arm_has_as_many_tries_and_is_reported_on_other_text_than_chose(
    name: str, arms: int, trainings: int, store: Store
) -> None:
    plan = planned(name, store)
    of_arms = {"select": 3 * arms, "evaluate": 3 * arms}
    assert kinds(plan) == {"tokenizer": 1, "corpus": 2, "mixture": 1, "pretrain": trainings, **of_arms}
    nodes = plan.graph.nodes
    chosen = [node for node in nodes.values() if node.kind == "select"]
    assert {node.name.rpartition("-")[2] for node in chosen} == {"28", "29", "30"}
    for node in chosen:
        tried = [segment(plan, read.name) for read in node.inputs.values()]
        assert len({str(part.optimizer) for part in tried}) == 3
        assert {part.seed for part in tried if part.start_step == 0} <= {int(node.name[-2:])}
        (same,) = {str((part.optimizer.name, part.model, part.schedule)) for part in tried}
        report = nodes[node.name.replace("chosen", "evaluate")].inputs
        trained = {nodes[read.name].inputs["mixture"].name for read in node.inputs.values()}
        assert report["source:0"].name == "corpus/other" and trained == {"main"} and same


@pytest.mark.parametrize(
    ("name", "batch", "arms", "thousands"),
    [
        ("budgets", 256, 13, (8, 16, 32, 48, 64, 128, 256)),
        ("budgets-batch-32", 32, 13, (64, 128, 256, 384, 512, 1024)),
        ("budgets-batch-512", 512, 12, (64,)),
        ("budgets-210m", 256, 12, (8, 16, 32, 48, 64, 128)),
        ("budgets-720m", 1984, 12, (8, 16, 48)),
    ],
)
def test_every_optimizer_has_the_budgets_of_the_paper_with_three_seeds(
    name: str, batch: int, arms: int, thousands: tuple[int, ...]
) -> None:
    """Arms: twelve, and one with another b3 of AdEMAMix, whose warm-ups are as long as each training."""
    pipeline = load(RECIPES / f"optimizer-benchmark-{name}.yaml")
    runs = trajectories(pipeline)
    assert Counter(run.steps for run in runs.values()) == {1000 * count: 3 * arms for count in thousands}
    assert all(run.tokens == run.steps * batch * 512 for run in runs.values())
    slow = [stage for stage in runs if "ademamix" in stage]
    assert len(slow) == 3 * (arms - 11) * len(thousands)
    for stage in slow:
        optimizer = pipeline.stages[stage].optimizer
        assert optimizer.alpha_warmup == optimizer.beta3_warmup == runs[stage].steps
    places = {claim.at for claim in pipeline.figures["budgets"].claims.values()} - {None}
    assert places <= {run.tokens for run in runs.values()}


def test_the_tokenizers_that_apertus_chose_among_are_counted_on_the_same_text(store: Store) -> None:
    plan = planned("tokenizer-study", store)
    assert kinds(plan) == {"parallel_text": 1, "token_counts": 4, "evaluate_tokenizers": 1}
    text = plan.graph.nodes["study/text"]
    assert len(set(text.identity["languages"])) == 55 and text.identity["lines"] == 997
    mini = planned("tokenizer-study-mini", store)
    assert kinds(mini) == {"tokenizer": 3, "parallel_text": 1, "token_counts": 3, "evaluate_tokenizers": 1}


def test_pairs_and_their_controls_are_the_same_checkpoints(store: Store) -> None:
    """Every evaluation of a rewrite reads a pretrained model, and the text that chooses and the other."""
    plan = planned("layer-pairs-mini", store)
    data = {"tokenizer": 1, "corpus": 2, "mixture": 1}
    assert kinds(plan) == data | {"pretrain": 3, "rewrite": 33, "cooldown": 6, "evaluate": 42, "select": 3}
    nodes = plan.graph.nodes
    for seed in (28, 29, 30):
        model = nodes[f"evaluate-pretrain-{seed}"].inputs["checkpoint"]
        forms = ("paired", "dropped", "swapped", "parallel", "random")
        for name in ("paired-0", *(f"{form}-{start}" for form in forms for start in (2, 4))):
            node = nodes[f"evaluate-rewrite-{name}-pretrain-{seed}"]
            assert node.inputs["checkpoint"] == model
            assert {"source:0", "source:1"} <= node.inputs.keys()
        paired, alone = (
            nodes[f"recover-{start}-{seed}"].identity for start in ("rewrite-paired-4-pretrain", "pretrain")
        )
        assert {name for name in paired if paired[name] != alone[name]} == {"model"}
        assert paired["trainable"] == ["layers.[4-7].*"]


def test_sparse_attention_and_its_control_cost_a_quarter_of_the_pairs(store: Store) -> None:
    """Variants differ in attention alone. Rewrites read the same checkpoints with full attention."""
    plan = planned("sparse-attention-mini", store)
    data = {"tokenizer": 1, "corpus": 1, "mixture": 1}
    assert kinds(plan) == data | {"pretrain": 12, "rewrite": 6, "cooldown": 9, "evaluate": 27}
    nodes = plan.graph.nodes
    for seed in (28, 29, 30):
        full = segment(plan, f"pretrain-full-{seed}")
        for name in ("hash", "drop", "window"):
            sparse = segment(plan, f"pretrain-{name}-{seed}")
            assert sparse.model.attention is not None
            assert sparse.model_copy(update={"model": full.model}).identity_fields() == full.identity_fields()
            share = sparse.model.attention.share(sparse.sequence_length)
            assert share == pytest.approx(1 / 4, rel=0.02)
            if name != "window":
                again = nodes[f"evaluate-rewrite-pretrain-{name}-{seed}"]
                assert (
                    again.inputs["checkpoint"]
                    == nodes[f"evaluate-pretrain-{name}-{seed}"].inputs["checkpoint"]
                )
                assert cast(EvaluatePart, again.part).model == full.model


def test_students_without_attention_differ_in_how_they_begin_and_read_equal_tokens(store: Store) -> None:
    plan = planned("mamba-mini", store)
    data = {"tokenizer": 1, "corpus": 2, "mixture": 1}
    assert kinds(plan) == data | {"pretrain": 1, "distill": 24, "evaluate": 19}
    teacher = segment(plan, "teacher")
    for seed in (28, 29, 30):
        attention, control, resting, resting_control, hybrid = (
            cast(DistillSegment, plan.graph.nodes[f"student-{name}-{seed}"].part)
            for name in ("attention", "random", "resting-attention", "resting-random", "resting-hybrid")
        )
        for student, other in ((attention, control), (resting, resting_control)):
            assert student.mamba is not None and other.mamba is not None
            assert student.mamba.model_copy(update={"initial": "random"}) == other.mamba
            assert student.model_copy(update={"mamba": other.mamba}) == other
        assert attention.model_copy(update={"trainable": resting.trainable}) == resting
        at_rest = trainable.sizes(resting.model).keys() - trainable.trained(resting.model, resting.trainable)
        assert at_rest == {name for name in trainable.sizes(resting.model) if ".feed_forward." in name}
        assert attention.model.mamba_layers == [0, 1] and attention.teacher == teacher.model
        assert hybrid.model.mamba_layers == [0] and hybrid.trainable == resting.trainable
        stages = [segment(plan, f"{name}-{seed}") for name in ("orient", "align", "staged")]
        assert [one.objective for one in stages] == ["alignment", "alignment", "distillation"]
        assert sum(one.end_step for one in stages) == attention.end_step
        assert {one.tokens_per_step for one in stages} == {attention.tokens_per_step}


def test_models_with_and_without_attention_answer_the_same_questions_after_equal_tuning(store: Store) -> None:
    plan = planned("mamba-time-mini", store)
    nodes = plan.graph.nodes
    mixers = {name: segment(plan, f"student-{name}-28").model.mamba for name in ("mamba", "hybrid", "linear")}
    assert mixers["linear"] == (mixers["mamba"] or Mamba(layers="all")).model_copy(update={"decay": False})
    assert segment(plan, "student-hybrid-28").model.mamba_layers == [0]
    for seed in (28, 29, 30):
        stages = [*(f"sft-{name}-{seed}" for name in mixers), f"sft-teacher-{seed}"]
        tuned = [segment(plan, stage).model_copy(update={"model": None}) for stage in stages]
        assert all(one == tuned[0] for one in tuned)
        asked = [nodes[stage.replace("sft", "evaluate") + "/completions"] for stage in stages]
        assert len({node.inputs["prompts"].fingerprint for node in asked}) == 1
        assert all(node.part == asked[0].part for node in asked)


def test_both_optimizers_meet_the_same_random_answers_and_are_asked_what_chose_nothing(store: Store) -> None:
    plan = planned("rote-memorisation-mini", store)
    data = {"tokenizer": 1, "corpus": 1, "mixture": 1, "conversations": 8}
    assert kinds(plan) == data | {"pretrain": 3, "sft": 18, "select": 6, "evaluate": 24}
    nodes, trained = plan.graph.nodes, set()
    for name, node in nodes.items():
        if node.kind == "sft":
            trained.add(tuple(read.hashed for role, read in node.inputs.items() if role != "parent"))
        if node.kind == "evaluate":
            _, asked, length, *_ = name.split("-")
            assert node.inputs["source:0"].name == f"asked/{asked}-{length}"
    assert len(trained) == 1
    for length in (4, 8):  # what is asked again is what was trained on, all of it on the other side
        known, again = (nodes[f"{stage}/random-{length}"] for stage in ("chat", "asked"))
        assert known.inputs["documents"] == again.inputs["documents"]
        processes = [node.identity["process"] for node in (known, again)]
        assert [process.pop("holdout") for process in processes] == [0, 0.9]
        assert processes == [{"count": 20}] * 2
