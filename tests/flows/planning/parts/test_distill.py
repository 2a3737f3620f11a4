"""Parts of distillation: the teacher is an input of every segment, or stored by a part before it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from flows.planning.estimate.inference import work_of
from flows.planning.estimate.work import Known
from flows.planning.plan import Plan, make
from flows.planning.run_records import Records
from infra.store import Store
from specs.errors import SpecError
from specs.mamba import OWN
from specs.recipe import load
from specs.stages.distill import DistillSegment, TeacherTokensPart
from tests.flows.comparing import changed, segment
from tests.models import flops_per_token
from tests.recipes import RECIPE, write_recipe
from tests.specs.stages.test_distill import STAGE

STORED = "stages.student.top_k=3"


def planned(tmp_path: Path, store: Store, *overrides: str) -> Plan:
    return make(load(write_recipe(tmp_path, RECIPE + STAGE), overrides), store)


def test_the_teacher_is_a_checkpoint_that_is_kept(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store, "stages.student.teacher=pretrain@step=7")
    node = plan.graph.nodes["student"]
    assert (node.inputs["teacher"].node, node.inputs["teacher"].step) == ("pretrain/1", 7)
    assert 7 in segment(plan, "pretrain/1").checkpoint.milestones
    part = cast(DistillSegment, node.part)
    assert (part.teacher, part.seed, part.top_k) == (segment(plan, "pretrain/1").model, 28, None)
    assert "parent" not in node.inputs and node.identity["teacher"]["dim"] == 32


def test_predictions_are_stored_before_each_segment(tmp_path: Path, store: Store) -> None:
    """The second segment continues with the samples of the mixture."""
    batches = "stages.student.global_batch_size={0 steps: 4, 3 steps: 2}"
    plan = planned(tmp_path, store, STORED, batches)
    parts = [plan.graph.nodes[f"student/{number}/teacher"] for number in (1, 2)]
    stored = [cast(TeacherTokensPart, node.part) for node in parts]
    assert [(one.first_sample, one.samples) for one in stored] == [(0, 12), (12, 10)]
    for number, node in enumerate(parts, start=1):
        student = plan.graph.nodes[f"student/{number}"]
        assert student.inputs["teacher"].node == node.name
        assert node.inputs["mixture"] == student.inputs["mixture"]
        assert (node.inputs["checkpoint"].node, node.inputs["checkpoint"].step) == ("pretrain/3", 16)
        assert (
            cast(DistillSegment, student.part).sample_offset
            == cast(TeacherTokensPart, node.part).first_sample
        )


def test_only_what_changes_the_predictions_computes_them_again(tmp_path: Path, store: Store) -> None:
    before = planned(tmp_path, store, STORED)
    for override, reruns in (
        ("stages.student.optimizer.lr=2e-2", {"student"}),
        ("stages.student.loss.direction=reverse", {"student"}),
        ("stages.student.goldfish.k=7", {"student"}),
        ("stages.student.loss.temperature=2", {"student", "student/teacher"}),
        ("stages.student.top_k=4", {"student", "student/teacher"}),
        ("stages.student.budget=9 steps", {"student", "student/teacher"}),
    ):
        assert changed(before, planned(tmp_path, store, STORED, override)) == reruns, override
    beside = planned(tmp_path, store)
    assert not changed(beside, planned(tmp_path, store, "stages.student.budget=9 steps"))


def test_a_pipeline_shares_the_teachers_weights_while_it_predicts(tmp_path: Path, store: Store) -> None:
    layout = "stages.student.launch={processes: 2, parallel: {pp: 2}}"
    deeper = "stages.student.model.n_layers=2"
    plan = planned(tmp_path, store, STORED, layout, deeper)
    part = cast(TeacherTokensPart, plan.graph.nodes["student/teacher"].part)
    assert (part.parallel.pp, part.parallel.dp_shard) == (1, -1)
    assert segment(plan, "student").parallel.pp == 2


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stages.student.teacher=pretrain@step=99", "is outside stage 'pretrain', which has 16 steps"),
        (
            "stages.student.model.vocab_size=640",
            "the vocabulary of 'pretrain' has 512 words, the student's 640",
        ),
    ],
)
def test_a_teacher_of_other_words_or_of_no_step_is_refused(
    tmp_path: Path, store: Store, override: str, told: str
) -> None:
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, store, override)
    assert told in str(caught.value)


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path: Path, store: Store) -> None:
    other = "  others: {{kind: tokenizer, sources: [notes], vocab_size: 384, bytes_per_source: 50_000}}\n"
    other += "  others-corpus: {{kind: corpus, tokenizer: others, sources: {{notes: {{}}}}}}\n"
    other += "  others-main: {{kind: mixture, weights: {{others-corpus/notes: 1}}, max_repetition: 100}}\n"
    recipe = write_recipe(tmp_path, RECIPE + other + STAGE)
    with pytest.raises(SpecError, match="is tokenised by 'others'"):
        make(load(recipe, ["stages.student.mixture=others-main"]), store)


def test_the_work_of_a_stored_teacher_is_a_forward_pass(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store, STORED)
    known = Known(plan.graph, store, Records(store, "tiny"))
    work = work_of(known, plan.graph.nodes["student/teacher"])
    assert work is not None
    model, tokens = segment(plan, "pretrain/1").model, 8 * 4 * 32
    assert (work.requests, work.read_tokens) == (8 * 4, tokens)
    assert work.forward_flops == tokens * flops_per_token(model, 32) // 3
    beside, stored = planned(tmp_path, store), plan
    difference = beside.graph.nodes["student"].flops - stored.graph.nodes["student"].flops
    assert difference == work.forward_flops


HYBRID = """\
  deep:
    kind: pretrain
    model: {{dim: 32, n_layers: 4, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512}}
    mixture: main
    sequence_length: 32
    global_batch_size: 4
    budget: 8 steps
    optimizer: {{lr: 1e-3}}
    schedule: {{decay: none}}
  half: {{kind: distill, teacher: deep, from: deep, mixture: main, budget: 4 steps, seed: 5,
    mamba: {{layers: [2, 1], chunk: 16}}}}
  aligned: {{kind: distill, teacher: deep, from: half, mixture: main, budget: 4 steps,
    loss: {{compare: hidden}}}}
  more: {{kind: distill, teacher: deep, from: half, mixture: main, budget: 4 steps, mamba: {{layers: [0]}}}}
  tuned: {{kind: cooldown, from: more, carry: [weights, optimizer], mixture: main, budget: 4 steps}}
"""


def hybrid(tmp_path: Path, store: Store, *overrides: str) -> Plan:
    return make(load(write_recipe(tmp_path, RECIPE + HYBRID), overrides), store)


def test_a_student_replaces_attention_layer_by_layer(tmp_path: Path, store: Store) -> None:
    plan = hybrid(tmp_path, store)
    half, more = (cast(DistillSegment, plan.graph.nodes[name].part) for name in ("half", "more"))
    assert half.model.mamba_layers == [1, 2] and more.model.mamba_layers == [0, 1, 2]
    assert half.teacher == more.teacher == segment(plan, "deep").model and not half.teacher.mamba_layers
    assert (half.seed, more.seed) == (5, 28) and plan.graph.nodes["half"].inputs["parent"].node == "deep"
    assert set(half.new_parameters) == {f"layers.{n}.attention.{name}" for n in (1, 2) for name in OWN}
    aligned = segment(plan, "aligned")
    assert aligned.trainable == ["layers.1.attention.*", "layers.2.attention.*"]
    assert DistillSegment.model_validate(aligned.model_dump(mode="json")) == aligned
    assert (aligned.objective, half.objective) == ("alignment", "distillation")
    assert segment(plan, "tuned").model == more.model and segment(plan, "tuned").new_parameters == ()
    control = cast(
        DistillSegment, hybrid(tmp_path, store, "stages.half.mamba.initial=random").graph.nodes["half"].part
    )
    assert control.new_parameters == ("layers.1.attention.*", "layers.2.attention.*")
    assert changed(plan, hybrid(tmp_path, store, "stages.half.mamba.layers=[1, 2]")) == set()
    assert changed(plan, hybrid(tmp_path, store, "stages.half.seed=6")) == {
        "half",
        "aligned",
        "more",
        "tuned",
    }


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stages.half.mamba.layers=[1, 1]", "names no layer, or one twice"),
        ("stages.half.mamba.layers=[4]", "there is no layer 4, the last is 3"),
        ("stages.more.mamba.layers=[0, 2]", "layers 2 of 'half' have no attention"),
        ("stages.more.mamba.conv_width=3", "of the mixers of 'half'. Fix: set conv_width: 4"),
        ("stages.more.mamba.decay=false", "of the mixers of 'half'. Fix: set decay: true"),
        ("stages.half.carry=[weights, optimizer]", "new parameters, without optimizer states"),
        ("stages.student.mamba={layers: [0]}", "mamba replaces the attention of a checkpoint"),
        ("stages.deep.model.repeats={start: 0, layers: 1, times: 2}", "mamba and repeats in one model"),
        (
            "stages.tuned={kind: distill, teacher: deep, from: deep, mixture: main, budget: 4 steps,"
            " loss: {compare: hidden}}",
            "nothing to compare",
        ),
        ("stages.aligned.loss.weight=0.5", "weight has no meaning with compare: hidden"),
        ("stages.aligned.top_k=4", "top_k is for whole forward passes"),
        ("stages.aligned.activation_checkpointing=full", "activation_checkpointing is for whole"),
        ("stages.aligned.launch={processes: 2, parallel: {tp: 2}}", "cannot divide layers (tp 2)"),
        (
            "stages.aligned.teacher=pretrain",
            "'pretrain' and the student with attention in all layers differ in",
        ),
        (
            "stages.half.launch={processes: 2, parallel: {cp: 2}}",
            "goes through a whole sequence, and each process has a part",
        ),
    ],
)
def test_mixers_that_cannot_be_replaced_are_refused(
    tmp_path: Path, store: Store, override: str, told: str
) -> None:
    recipe = write_recipe(tmp_path, RECIPE + HYBRID + (STAGE if "student" in override else ""))
    with pytest.raises(SpecError) as caught:
        make(load(recipe, [override]), store)
    assert told in str(caught.value)
