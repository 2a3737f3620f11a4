"""The layouts of a part: what is enumerated passes the checks, and what is written is what a recipe reads."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from apertus_model.rehearsal.rates import Rates
from flows.planning.estimate.sizes import micro_batches_of
from flows.planning.estimate.training import PartEstimate
from flows.planning.layouts import LEAST_TOKENS, Layout, flow, layouts
from flows.planning.plan import make
from infra.store import Store
from specs.capabilities import OBJECTIVES
from specs.launch import Launch, Parallel
from specs.layout import misfits
from specs.recipe import load
from specs.stages.distill import DistillLoss, DistillSegment
from specs.stages.training import Segment
from specs.trajectory import phases
from tests.machine import slow

RECIPES = Path(__file__).parents[3] / "specs" / "recipes"
RATES = Rates("GH200", 4)
# recipe, stage, GPUs
PARTS = [
    ("apertus-8b", "pretrain", 256),
    ("apertus-8b", "long-context-64k", 512),
    ("apertus-8b", "align", 64),
    ("apertus-70b", "pretrain", 1024),
    ("apertus-70b", "sft", 96),
]


def part_of(recipe: Path, stage: str, *overrides: str) -> PartEstimate:
    pipeline = load(str(recipe), list(overrides))
    plan = make(pipeline, Store.open("memory://layouts"), lambda name, listing: None, ask_network=False)
    return plan.estimates.stages[stage].parts[-1]


@cache
def segment_of(recipe: str, stage: str) -> Segment:
    """Of a shipped recipe."""
    return part_of(RECIPES / f"{recipe}.yaml", stage).segment


@pytest.mark.parametrize(
    ("recipe", "stage", "gpus"), [PARTS[1], PARTS[2], *(slow(*PARTS[number]) for number in (0, 3, 4))]
)
def test_every_layout_passes_the_checks_and_they_come_fastest_first(
    recipe: str, stage: str, gpus: int
) -> None:
    segment = segment_of(recipe, stage)
    found = layouts(segment, gpus, RATES)
    assert found == sorted(found, key=lambda layout: layout.seconds)
    assert len({(str(layout.launch), str(layout.settings)) for layout in found}) == len(found) > 50
    for layout in found:
        launch = Launch(processes=gpus, parallel=Parallel(**layout.launch["parallel"]))
        assert launch.mismatch is None
        assert segment.global_batch_size % launch.data_parallel == 0
        assert not list(misfits(launch, segment.model, segment.sequence_length, segment.global_batch_size))
        assert layout.parallel.tp <= RATES.gpus_per_node
        assert segment.sequence_length // layout.parallel.cp >= LEAST_TOKENS
        assert layout.parallel.pp == 1 or not OBJECTIVES[segment.objective].pipeline_obstacle


@pytest.mark.parametrize(
    ("recipe", "stage", "gpus"), [PARTS[2], *(slow(*PARTS[number]) for number in (0, 1, 3, 4))]
)
def test_a_layout_that_is_pasted_or_set_is_what_the_recipe_runs(
    recipe: str, stage: str, gpus: int, tmp_path: Path
) -> None:
    path = RECIPES / f"{recipe}.yaml"
    part = part_of(path, stage)
    pipeline = load(str(path))
    at = phases(pipeline, stage)[-1].path
    found = layouts(part.segment, gpus, RATES)
    for layout in (found[0], found[len(found) // 2], found[-1]):
        pasted = tmp_path / "pasted.yaml"
        pasted.write_text(f"extends: {path}\n{layout.to_yaml(at)}")
        launch = load(str(pasted)).stages[stage].launch
        assert launch.processes == gpus and launch.parallel is not None
        assert launch.parallel == layout.parallel.model_copy(update={"dp_shard": layout.dp_shard})
        again = part_of(path, stage, *layout.overrides(at))
        assert again.gpus == gpus
        assert again.segment.parallel == launch.parallel
        parallel = {"parallel": layout.parallel}
        assert again.segment.model_copy(update=parallel) == layout.segment
        if stage != "long-context-64k":  # a step of several: only its launch can be stated apart
            assert part_of(pasted, stage).segment == again.segment


@pytest.mark.parametrize("recipe", ["apertus-8b", slow("apertus-70b")])
def test_the_layout_of_a_published_run_is_among_them(recipe: str) -> None:
    """That of the 70B has five stages of the pipeline on each process."""
    part = part_of(RECIPES / f"{recipe}.yaml", "pretrain")
    own = Layout(part.segment, part.gpus, RATES)
    size = micro_batches_of(part.segment, part.gpus)[0]
    expected = own.launch, own.settings | {"micro_batch_size": size}
    found = layouts(part.segment, part.gpus, RATES)
    assert expected in [(layout.launch, layout.settings) for layout in found]


def test_settings_that_are_not_searched_are_the_recipe_s() -> None:
    segment = segment_of("apertus-8b", "pretrain")
    own = Parallel(tp=2, sequence_parallel=True, async_tp=True, reshard_after_forward="never")
    chosen = segment.model_copy(update={"parallel": own, "compile": True})
    found = {
        (each.tp > 1 and each.sequence_parallel, each.async_tp, each.reshard_after_forward)
        for each in (layout.parallel for layout in layouts(chosen, 64, RATES))
    }
    assert found == {(True, True, "never"), (False, False, "never")}


def test_a_student_with_its_teacher_can_be_spread_over_a_pipeline() -> None:
    segment = segment_of("apertus-8b", "pretrain")
    fields = segment.model_dump() | {"teacher": segment.model, "loss": DistillLoss()}
    student = DistillSegment.model_validate(fields)
    found = layouts(student, 16, RATES)
    assert {layout.parallel.pp for layout in found} == {1, 2, 4, 8, 16}
    for layout in found:
        if layout.parallel.pp == 1:
            changes = {"parallel": layout.parallel, **layout.settings}
            alone = Layout(segment.model_copy(update=changes), 16, RATES)
            assert layout.memory > alone.memory


def test_a_backend_that_cannot_share_sequences_gets_no_context_parallelism() -> None:
    segment = segment_of("apertus-8b", "long-context-64k")
    for backend, degrees in (("auto", {1, 2, 4, 8, 16, 32}), ("varlen", {1}), ("flash", {1})):
        chosen = segment.model_copy(update={"attention": backend})
        assert {layout.parallel.cp for layout in layouts(chosen, 512, RATES)} == degrees


def test_compiled_layers_are_not_recomputed_under_tensor_parallelism() -> None:
    segment = segment_of("apertus-8b", "pretrain")
    compiled = segment.model_copy(update={"compile": True})
    found = {
        (layout.parallel.tp > 1, layout.settings["activation_checkpointing"])
        for layout in layouts(compiled, 64, RATES)
    }
    assert found == {(False, "none"), (False, "selective"), (False, "full"), (True, "none")}


def test_a_batch_that_cannot_be_divided_has_no_layout() -> None:
    segment = segment_of("apertus-8b", "pretrain")
    assert layouts(segment, 37 * 4, RATES) == []


def test_values_are_yaml_on_one_line() -> None:
    assert flow({"parallel": {"tp": 2, "sequence_parallel": True, "pp_schedule": "1f1b"}}) == (
        "{parallel: {tp: 2, sequence_parallel: true, pp_schedule: 1f1b}}"
    )


def test_what_differs_in_copies_micro_batch_and_recomputation_is_one_kind() -> None:
    segment = segment_of("apertus-8b", "pretrain")
    one = Layout(segment, 64, RATES)
    alike = segment.model_copy(update={"parallel": Parallel(tp=2, dp_replicate=4), "micro_batch_size": 1})
    other = segment.model_copy(update={"parallel": Parallel(tp=2, sequence_parallel=True)})
    assert one.kind == Layout(alike, 64, RATES).kind != Layout(other, 64, RATES).kind
