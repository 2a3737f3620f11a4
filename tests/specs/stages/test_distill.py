"""A student has a teacher, and begins somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.recipe import load
from specs.stages.distill import DistillStage
from tests.recipes import RECIPE, problems, write_recipe

STAGE = """\
  student:
    kind: distill
    teacher: pretrain
    model: {{dim: 16, n_layers: 1, n_heads: 2, n_kv_heads: 1, head_dim: 8, ffn_dim: 32, vocab_size: 512}}
    mixture: main
    sequence_length: 32
    global_batch_size: 4
    budget: 8 steps
    optimizer: {{name: adamw, lr: 1e-2}}
"""


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stages.student.from=cooldown", "set from or model"),
        ("stages.student.model=null", "set from or model"),
        ("stages.student.global_batch_size=null", "a distill stage with new weights has no parent to take"),
        ("stages.student.model.head=reward", "pretraining needs the logits of a vocabulary"),
        ("stages.student.teacher=corpus", "stage 'corpus' is a corpus; one of"),
        ("stages.student.teacher=student", "the stages form a cycle: student -> student"),
        ("stages.student.loss.weight=0", "0 is not above 0.0"),
        ("stages.student.loss.temperature=0", "0 is below 0.01"),
        ("stages.student.loss.direction=both", "use one of forward, reverse"),
        ("stages.student.top_k=512", "leaves out no word of a vocabulary of 512"),
        ("stages.student.optimizer.name=sophia", "needs cross-entropy over the tokens of a step, and not"),
        (
            "stages.student.launch={processes: 2, parallel: {tp: 2}}",
            "of its teacher, n_kv_heads 1 cannot be divided among 2 tensor-parallel processes",
        ),
    ],
)
def test_a_wrong_student_is_refused_with_the_reason(tmp_path: Path, override: str, told: str) -> None:
    assert told in problems(write_recipe(tmp_path, RECIPE + STAGE), override)


def test_it_begins_with_new_weights_or_with_those_of_a_checkpoint(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE + STAGE)
    fields = {"model": None, "from": "cooldown", "optimizer": "{name: ademamix}"}
    later = [f"stages.student.{name}={'null' if value is None else value}" for name, value in fields.items()]
    for overrides, parent, seed, carry in (([], None, 28, ()), (later, "cooldown", None, ("weights",))):
        stage = load(recipe, overrides).stages["student"]
        assert isinstance(stage, DistillStage)
        (phase,) = stage.phases("student")
        assert (phase.parent and str(phase.parent), phase.seed, phase.carry) == (parent, seed, carry)
