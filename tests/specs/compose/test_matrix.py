"""`matrix`: the variants that it makes, references between them, overrides, and where errors point."""

from __future__ import annotations

import json

import pytest

from specs.compose import expand
from specs.document import parse
from specs.recipe import load
from tests.specs.composing import BASE, VARIANTS, data, errors, problems, stage, write

pytestmark = pytest.mark.usefixtures("beside_the_base")


MATRIX = """\
stages:
  align:
    kind: align
    loss:
      beta: 1
    seed: 1
    matrix:
      qrpo: {loss: {beta: 5}}
      dpo: {kind: dpo, seed: null}
      plain:
  export:
    kind: export
    after: [align]
"""


def test_named_variants_are_merged_over_the_stage_at_its_place() -> None:
    stages = data(MATRIX)["stages"]
    assert list(stages) == ["align-qrpo", "align-dpo", "align-plain", "export"]
    assert stages["align-qrpo"] == {"kind": "align", "loss": {"beta": 5}, "seed": 1}
    assert stages["align-dpo"] == {"kind": "dpo", "loss": {"beta": 1}}
    assert stages["align-plain"] == {"kind": "align", "loss": {"beta": 1}, "seed": 1}


def test_a_grid_makes_every_combination_named_after_its_values() -> None:
    stages = data(
        "stages: {a: {lr: {x: 0}, matrix: {lr.peak: [1e-4, 0.5], seed: [1, null], note: [a b/c]}}}\n"
    )["stages"]
    assert stages == {
        "a-1e-4-1-a_b_c": {"lr": {"x": 0, "peak": 1e-4}, "seed": 1, "note": "a b/c"},
        "a-1e-4-null-a_b_c": {"lr": {"x": 0, "peak": 1e-4}, "seed": None, "note": "a b/c"},
        "a-0.5-1-a_b_c": {"lr": {"x": 0, "peak": 0.5}, "seed": 1, "note": "a b/c"},
        "a-0.5-null-a_b_c": {"lr": {"x": 0, "peak": 0.5}, "seed": None, "note": "a b/c"},
    }


def test_a_list_with_a_dollar_is_a_variable_of_the_variant() -> None:
    text = """\
variables: {lr: 5, rates: [1e-4, 2]}
stages:
  a:
    {from: "${base}-${seed}", lr: "${lr}", own: "${steps}",
     matrix: {$base: [s, m], $lr: "${rates}", x: {y: 1}, $steps: ["${lr}"], $seed: [1]}}
  b: {lr: "${lr}", matrix: [s-1e-4]}
"""
    stages = data(text)["stages"]
    assert stages == {
        "a-x-s-1e-4-5-1": {"from": "s-1", "lr": 1e-4, "own": 5, "y": 1},
        "a-x-s-2-5-1": {"from": "s-1", "lr": 2, "own": 5, "y": 1},
        "a-x-m-1e-4-5-1": {"from": "m-1", "lr": 1e-4, "own": 5, "y": 1},
        "a-x-m-2-5-1": {"from": "m-1", "lr": 2, "own": 5, "y": 1},
        "b-s-1e-4": {"lr": 5},
    }
    (problem,) = expand(parse("stages: {a: {from: '${bas}', matrix: {$base: [s]}}}", "f.yaml")).problems
    assert "there is no variable 'bas'" in problem.message and "base" in problem.fix


def test_names_and_lists_together_are_every_combination() -> None:
    text = "stages: {a: {lr: 1, matrix: {adamw: {lr: 2}, lion: {name: lion}, seed: [1, 2]}}}\n"
    assert data(text)["stages"] == {
        "a-adamw-1": {"lr": 2, "seed": 1},
        "a-adamw-2": {"lr": 2, "seed": 2},
        "a-lion-1": {"lr": 1, "name": "lion", "seed": 1},
        "a-lion-2": {"lr": 1, "name": "lion", "seed": 2},
    }


def test_lists_are_values_of_a_grid_too() -> None:
    stages = data("stages: {a: {matrix: {betas: [[0.9, 0.99], [0.8]]}}}\n")["stages"]
    assert stages == {"a-0.9_0.99": {"betas": [0.9, 0.99]}, "a-0.8": {"betas": [0.8]}}


def test_a_variant_refers_to_the_same_variant_of_another_stage() -> None:
    text = """\
    stages:
      evaluate: {from: "align-${matrix}", note: "${matrix}", matrix: [qrpo, dpo]}
      report: {from: "evaluate-${matrix}", matrix: {qrpo: {}, dpo: {note: "only ${matrix}"}}}
    """
    assert data(text)["stages"] == {
        "evaluate-qrpo": {"from": "align-qrpo", "note": "qrpo"},
        "evaluate-dpo": {"from": "align-dpo", "note": "dpo"},
        "report-qrpo": {"from": "evaluate-qrpo"},
        "report-dpo": {"from": "evaluate-dpo", "note": "only dpo"},
    }


def test_a_list_of_stages_may_name_all_variants_at_once() -> None:
    text = """\
    stages:
      align: {matrix: [a, b]}
      report: {after: [x, align], checkpoints: [align, x], evaluations: [align], sources: [align],
        from: align, other: {after: [align]}}
    """
    report = data(text)["stages"]["report"]
    assert report == {
        "after": ["x", "align-a", "align-b"],
        "checkpoints": ["align-a", "align-b", "x"],
        "evaluations": ["align-a", "align-b"],
        "sources": ["align"],
        "from": "align",
        "other": {"after": ["align"]},
    }


def test_variables_are_filled_in_inside_a_matrix() -> None:
    text = """\
    variables: {rates: [1e-4, 2e-4], names: [x, y], rate: 3e-4, prefix: a, text: '$${rate}'}
    stages:
      ${prefix}-grid: {matrix: {lr: "${rates}", seed: ["${rate}", 1]}}
      list: {matrix: "${names}"}
      named: {matrix: {"${prefix}1": {lr: "${rate}", text: "${text}"}}}
      literal: {matrix: {text: ["${text}"]}}
    """
    assert data(text)["stages"] == {
        "a-grid-1e-4-3e-4": {"lr": 1e-4, "seed": 3e-4},
        "a-grid-1e-4-1": {"lr": 1e-4, "seed": 1},
        "a-grid-2e-4-3e-4": {"lr": 2e-4, "seed": 3e-4},
        "a-grid-2e-4-1": {"lr": 2e-4, "seed": 1},
        "list-x": {},
        "list-y": {},
        "named-a1": {"lr": 3e-4, "text": "${rate}"},
        "literal-rate": {"text": "${rate}"},
    }


def test_overrides_reach_the_matrix_the_stage_and_one_variant() -> None:
    overrides = [
        "stages.align.matrix.qrpo.loss.beta=7",
        "stages.align.seed=3",
        "stages.align-plain.loss.beta=9",
    ]
    overrides.append("stages.align-plain.loss.text=x ${matrix}")
    stages = data(MATRIX, *overrides)["stages"]
    assert stages["align-qrpo"] == {"kind": "align", "loss": {"beta": 7}, "seed": 3}
    assert stages["align-dpo"] == {"kind": "dpo", "loss": {"beta": 1}}
    assert stages["align-plain"] == {"kind": "align", "loss": {"beta": 9, "text": "x plain"}, "seed": 3}


def test_an_override_reaches_a_variant_with_dots_in_its_name() -> None:
    stages = data("stages: {a: {matrix: {lr: [0.5, 0.25]}}}\n", "stages.a-0.5.seed=3")["stages"]
    assert stages == {"a-0.5": {"lr": 0.5, "seed": 3}, "a-0.25": {"lr": 0.25}}


def test_overrides_that_reach_no_variant_are_errors() -> None:
    grid = "stages: {align: {lr: 1, matrix: {lr: [2, 3]}}}\n"
    assert problems(grid, "stages.align.lr=4", "stages.align-5.lr=1", "stages.aling.lr=1", "extends=x") == [
        "--set extends=x: extends: files are merged before overrides are applied. Fix: set it in the file.",
        (
            "--set stages.align-5.lr=1: the override matches nothing: there is no stage 'align-5'. Fix: did"
            " you mean 'align-3'?"
        ),
        (
            "--set stages.aling.lr=1: the override matches nothing: there is no stage 'aling'. Fix: did you"
            " mean 'align'?"
        ),
        (
            "--set stages.align.lr=4: the override matches nothing: every variant of 'align' states that"
            " field itself. Fix: set it in stages.align.matrix, or of one variant, for example align-2."
        ),
    ]


FORMS = "write [a, b], {a: {seed: 1}, b: {seed: 2}} or {seed: [1, 2]}."


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            "  a: {matrix: {}}",
            (
                "2: stages.a.matrix: the matrix is empty, so there is no stage. Fix: list a variant, or"
                " remove the stage."
            ),
        ),
        (
            "  a: {matrix: []}",
            (
                "2: stages.a.matrix: the matrix is empty, so there is no stage. Fix: list a variant, or"
                " remove the stage."
            ),
        ),
        (
            "  a: {matrix: {lr: []}}",
            "2: stages.a.matrix.lr: this list is empty. Fix: list at least one value.",
        ),
        (
            "  a: {matrix: 3}",
            (
                "2: stages.a.matrix: a matrix is a list of names, a mapping of names to the fields that they"
                f" change, or of fields to lists of values. Fix: {FORMS}"
            ),
        ),
        (
            "  a: {matrix: {x: {}, lr: 3}}",
            (
                "2: stages.a.matrix: a matrix has names with the fields that they change, and fields with"
                " lists of values. Fix: write {a: {lr: 1}, b: {lr: 2}}, {seed: [1, 2]}, or both: {a: {},"
                " b: {}, seed: [1, 2]}."
            ),
        ),
        (
            "  a:\n    matrix:\n      - x\n      - x",
            "5: stages.a.matrix[1]: two variants are named 'a-x'. Fix: keep one, or give them names.",
        ),
        (
            "  a: {matrix: {seed: [1, 1]}}",
            "2: stages.a.matrix: two variants are named 'a-1'. Fix: keep one, or give them names.",
        ),
        (
            "  a:\n    matrix:\n      x: {}\n  a-x: {}",
            (
                "4: stages.a.matrix.x: the variant and another stage are both named 'a-x'. Fix: rename one of"
                " the two."
            ),
        ),
        (
            "  a: {matrix: [b-c]}\n  a-b: {matrix: [c]}",
            (
                "3: stages.a-b.matrix[0]: the variant and another stage are both named 'a-b-c'. Fix: rename"
                " one of the two."
            ),
        ),
        (
            "  a: {matrix: [b/c]}",
            "2: stages.a.matrix[0]: 'b/c' is not a name. Fix: use letters, digits, _, . and -.",
        ),
        (
            "  a: {matrix: [{b: c}]}",
            "2: stages.a.matrix[0]: '{b: c}' is not a name. Fix: use letters, digits, _, . and -.",
        ),
        (
            "  a: {matrix: {b: {matrix: [c]}}}",
            "2: stages.a.matrix.b: a matrix inside a matrix. Fix: list more fields in one matrix.",
        ),
        (
            "  a: {lr: 3, matrix: {lr.x: [1]}}",
            "2: stages.a.matrix.lr.x: there is no field 'lr.x': 'lr' is not a mapping. Fix: change that one.",
        ),
        (
            "  a: {matrix: {lr..x: [1]}}",
            (
                "2: stages.a.matrix.lr..x: 'lr..x' is not the path of a field. Fix: write for example"
                " optimizer.lr."
            ),
        ),
        (
            "  a: {matrix: {lr: [1], lr.x: [1]}}",
            (
                "2: stages.a.matrix.lr.x: the matrix sets this field and a field that contains it. Fix: keep"
                " one."
            ),
        ),
        (
            "  a: {matrix: {x: ['${matrix}']}}",
            (
                "2: stages.a.matrix.x[0]: ${matrix} is known only inside a stage with a matrix. Fix: name the"
                " variant."
            ),
        ),
        (
            "  a: {matrix: '${x}'}",
            "2: stages.a.matrix: there is no variable 'x'. Fix: there is none to choose from.",
        ),
        (
            f"  a: {{matrix: {{x: {list(range(40))}, y: {list(range(40))}}}}}",
            "2: stages.a.matrix: the matrix makes 1600 stages; 1000 are allowed. Fix: shorten its lists.",
        ),
    ],
)
def test_each_wrong_matrix_is_one_problem(stages: str, message: str) -> None:
    assert problems(f"stages:\n{stages}\n") == [f"f.yaml:{message}"]


def test_pipeline_with_variants_is_recorded_resolved() -> None:
    text = (
        VARIANTS.replace("fast", "${lr}")
        .replace("bananas", "steps")
        .replace("        sequence_lenght: 1\n", "")
    )
    dumped = load(write("child.yaml", text + "variables: {lr: 3e-3}\n")).model_dump(
        mode="json", by_alias=True
    )
    assert {"extends", "variables"} & set(dumped) == set()
    assert dumped["stages"]["cooldown-long"]["budget"] == "9 steps"
    assert dumped["stages"]["cooldown-long"]["optimizer"]["lr"] == 3e-3
    assert dumped["stages"]["export-short"]["from"] == "cooldown-short"
    assert "cooldown" not in dumped["stages"]
    assert "matrix" not in json.dumps(dumped)


def test_error_in_a_variant_names_its_line_and_a_shared_one_is_reported_once() -> None:
    assert errors(write("child.yaml", VARIANTS)) == [
        (
            "child.yaml:5: stages.cooldown-short.optimizer.lr: 'fast' is not a number. Fix: write a number,"
            " such as 0.1."
        ),
        (
            "child.yaml:9: stages.cooldown-long.budget: 'bananas' is not a unit of training; use tokens,"
            " samples or steps"
        ),
        (
            "child.yaml:10: stages.cooldown-long.sequence_lenght: there is no field 'sequence_lenght' here. "
            "Fix: did you mean 'sequence_length'?"
        ),
    ]


def test_an_error_in_a_grid_points_to_the_value_in_its_list() -> None:
    grid = "    matrix:\n      optimizer.lr:\n        - 1e-3\n        - fast\n      seqence_length: [32]\n"
    text = BASE.replace("    budget: 6 steps\n", "    budget: 6 steps\n" + grid)
    assert errors(write("base.yaml", text)) == [
        (
            "base.yaml:28: stages.cooldown-1e-3-32.seqence_length: there is no field 'seqence_length' here. "
            "Fix: did you mean 'sequence_length'?"
        ),
        (
            "base.yaml:27: stages.cooldown-fast-32.optimizer.lr: 'fast' is not a number. Fix: write a number,"
            " such as 0.1."
        ),
        (
            "base.yaml:29: stages.export.from: stage 'cooldown' is a matrix of cooldown-1e-3-32,"
            " cooldown-fast-32; name one of them"
        ),
    ]


def test_a_reference_to_a_stage_that_is_a_matrix_names_the_variants() -> None:
    text = (
        VARIANTS.replace("fast", "1e-3")
        .replace("9 bananas", "9 steps")
        .replace("        sequence_lenght: 1\n", "")
    )
    text = text.replace(
        "    matrix: [short, long]\n    from: cooldown-${matrix}\n", "    after: [cooldown]\n"
    )
    assert errors(write("child.yaml", text)) == [
        "base.yaml:24: stages.export.from: stage 'cooldown' is a matrix of cooldown-short, cooldown-long;"
        " name one of them"
    ]
    text = text.replace("after: [cooldown]", "after: [cooldown]\n    from: cooldown-lang")
    assert errors(write("child.yaml", text)) == [
        "child.yaml:12: stages.export.from: there is no stage 'cooldown-lang'. Fix: did you mean"
        " 'cooldown-long'?"
    ]
    text = text.replace("cooldown-lang", "cooldown-long")
    assert stage(load(write("child.yaml", text)), "export").after == ["cooldown-short", "cooldown-long"]


def test_a_wrong_matrix_does_not_hide_other_problems() -> None:
    text = VARIANTS.replace("long:", "so/long:") + "  main: {sed: 1}\n"
    assert errors(write("child.yaml", text)) == [
        (
            "child.yaml:8: stages.cooldown.matrix.so/long: 'so/long' is not a name. Fix: use letters, digits,"
            " _, . and -."
        ),
        "child.yaml:14: stages.main.sed: there is no field 'sed' here. Fix: did you mean 'seed'?",
        (
            "child.yaml:13: stages.export-long.from: there is no stage 'cooldown-long'. Fix: use one of"
            " pretrain."
        ),
    ]


@pytest.mark.parametrize(
    ("wrong", "right"), [("extend", "extends"), ("variabels", "variables"), ("mtrix", "matrix")]
)
def test_suggestions_include_composition_keywords(wrong: str, right: str) -> None:
    text = (
        f"{wrong}: x\n" + BASE
        if wrong != "mtrix"
        else BASE.replace("    budget: 6 steps\n", "    budget: 6 steps\n    mtrix: [a]\n")
    )
    assert [f"Fix: did you mean '{right}'?" in line for line in errors(write("base.yaml", text))] == [True]
