"""Composing files: what `extends`, `variables` and `matrix` make, and where their errors point."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from specs.compose import expand
from specs.document import MAX_VALUES, Document, parse
from specs.errors import SpecError
from specs.pipeline import Pipeline, load
from specs.schema import json_schema

BASE = """\
name: base
sources:
  notes: {url: /nowhere, format: text}
stages:
  tokenizer: {kind: tokenizer, sources: [notes], vocab_size: 512}
  corpus: {kind: corpus, tokenizer: tokenizer, sources: {notes: {holdout: 0.2}}}
  main: {kind: mixture, weights: {corpus/notes: 1}}
  pretrain:
    kind: pretrain
    model: {flavour: mini}
    mixture: main
    sequence_length: 32
    global_batch_size: 4
    budget: 16 steps
    optimizer:
      lr: 1e-2
      weight_decay: 0.1
    goldfish: {k: 4}
  cooldown:
    kind: cooldown
    from: pretrain
    mixture: main
    budget: 6 steps
  export: {kind: export, from: cooldown}
"""


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("base.yaml", BASE)


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return name


def errors(name: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(name, overrides)
    return str(caught.value).splitlines()


def data(text: str, *overrides: str) -> dict[str, Any]:
    """What a text becomes, without the models."""
    document = expand(parse(textwrap.dedent(text), "f.yaml"), overrides)
    assert document.problems == []
    return document.data


def problems(text: str, *overrides: str) -> list[str]:
    return [str(problem) for problem in expand(parse(textwrap.dedent(text), "f.yaml"), overrides).problems]


def stage(pipeline: Pipeline, name: str) -> Any:
    return pipeline.stages[name]


# extends


def test_the_file_wins_over_the_one_it_extends_key_by_key() -> None:
    child = write(
        "child.yaml",
        """\
        extends: base.yaml
        name: child
        stages:
          pretrain:
            optimizer: {lr: 2e-2, betas: [0.9, 0.99, 0.99]}
          export: null
          second: {kind: mixture, weights: {corpus/notes: 1}, seed: 2}
        """,
    )
    pipeline = load(child)
    assert pipeline.name == "child"
    assert list(pipeline.stages) == ["tokenizer", "corpus", "main", "pretrain", "cooldown", "second"]
    optimizer = stage(pipeline, "pretrain").optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas) == (2e-2, 0.1, (0.9, 0.99, 0.99))
    assert stage(pipeline, "pretrain").goldfish.k == 4


def test_files_extend_each_other_in_a_chain_relative_to_the_file_that_says_it() -> None:
    write("folder/middle.yaml", "extends: ../base.yaml\nname: middle\nconcurrency: 2\n")
    pipeline = load(write("child.yaml", "extends: folder/middle.yaml\nname: child\n"))
    assert (pipeline.name, pipeline.concurrency, len(pipeline.stages)) == ("child", 2, 6)


def test_null_removes_a_field_that_the_extended_file_states_and_a_variable_sets_null() -> None:
    removed = load(write("removed.yaml", "extends: base.yaml\nstages: {pretrain: {goldfish: null}}\n"))
    assert stage(removed, "pretrain").goldfish.k == 50  # the default
    text = 'extends: base.yaml\nvariables: {none: null}\nstages: {pretrain: {goldfish: "${none}"}}\n'
    assert stage(load(write("none.yaml", text)), "pretrain").goldfish is None


def test_an_error_names_the_file_in_which_the_wrong_value_stands() -> None:
    write("base.yaml", BASE.replace("weight_decay: 0.1", "weight_decay: heavy"))
    child = write(
        "child.yaml",
        """\
        extends: base.yaml
        stages:
          pretrain:
            budget: 20 bananas
          cooldown:
            form: pretrain
        """,
    )
    assert errors(child) == [
        "child.yaml:4: stages.pretrain.budget: 'bananas' is not a unit of training; use tokens, samples or steps",
        "base.yaml:17: stages.pretrain.optimizer.weight_decay: 'heavy': input should be a valid number, unable to parse string as a number",
        "child.yaml:6: stages.cooldown.form: there is no field 'form' here. Fix: did you mean 'from'?",
    ]


def test_removing_a_stage_that_is_not_there_is_an_error_beside_all_others() -> None:
    child = write("child.yaml", "extends: base.yaml\nstages:\n  exprt: null\n  main: {sed: 1}\n")
    assert errors(child) == [
        "child.yaml:3: stages.exprt: there is no stage 'exprt' that could be removed. Fix: did you mean 'export'?",
        "child.yaml:4: stages.main.sed: there is no field 'sed' here. Fix: did you mean 'seed'?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nextends: bsae.yaml\n", "child.yaml:2: extends: there is no file 'bsae.yaml'. Fix: did you mean 'base.yaml'?"),
        ("extends: 3\n", "child.yaml:1: extends: 3 is not a file. Fix: name one file, relative to this one."),
        ("extends: [base.yaml]\n", "child.yaml:1: extends: ['base.yaml'] is not a file. Fix: name one file, relative to this one."),
        ('extends: "a\\0b"\n', "child.yaml:1: extends: there is no file 'a\0b'. Fix: use one of bad.yaml, base.yaml, loop.yaml."),
        ("extends: bad.yaml\n", "bad.yaml:2: not YAML: expected the node content, but found '<stream end>'."),
        ("\nextends: child.yaml\n", "child.yaml:2: extends: the files extend each other: child.yaml -> child.yaml."),
        ("extends: loop.yaml\n", "loop.yaml:2: extends: the files extend each other: loop.yaml -> loop.yaml."),
    ],
)
def test_what_cannot_be_extended_is_named_with_file_and_line(text: str, message: str) -> None:
    write("bad.yaml", "a: [\n")
    write("loop.yaml", "name: loop\nextends: ./loop.yaml\n")
    found = errors(write("child.yaml", text))
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_cycle_of_files_is_named_as_a_whole() -> None:
    for one, other in (("a", "b"), ("b", "c"), ("c", "a")):
        write(f"{one}.yaml", f"name: {one}\nextends: {other}.yaml\n")
    cycle = "the files extend each other: a.yaml -> b.yaml -> c.yaml -> a.yaml"
    assert errors("a.yaml") == [f"c.yaml:2: extends: {cycle}. Fix: let one of them stand alone."]


# variables


def test_a_variable_alone_keeps_its_type_and_inside_a_text_it_is_as_written() -> None:
    text = """\
    variables: {lr: 1e-4, n: 4_096, quoted: '12', on: true, none: null, list: [1, "${n}"], map: {a: 1}}
    alone: {lr: "${lr}", n: '${n}', quoted: "${quoted}", on: "${on}", none: "${none}", list: "${list}", map: "${map}"}
    inside: x${lr}-${n} ${quoted}${on}${none}
    items:
      - ${n} steps
    "${n} samples": first
    """
    assert data(text) == {
        "alone": {"lr": 1e-4, "n": 4096, "quoted": "12", "on": True, "none": None, "list": [1, 4096], "map": {"a": 1}},
        "inside": "x1e-4-4_096 12truenull",
        "items": ["4_096 steps"],
        "4_096 samples": "first",
    }


def test_two_dollars_write_the_text_itself() -> None:
    assert data("variables: {a: 1, b: '$${a}'}\nx: $${a} ${a} $$${a} $ {\ny: ${b}\n") == {"x": "${a} 1 $${a} $ {", "y": "${a}"}


def test_variables_use_others_are_inherited_and_overridden() -> None:
    write("base.yaml", "variables: {steps: 16, budget: '${steps} steps', unused: 1}\n" + BASE.replace("16 steps", "${budget}"))
    child = write("child.yaml", "extends: base.yaml\nname: run-${steps}\nvariables: {steps: 20}\n")
    assert str(stage(load(child), "pretrain").budget) == "20 steps"
    overridden = load(child, ["variables.steps=30"])
    assert (overridden.name, str(stage(overridden, "pretrain").budget)) == ("run-30", "30 steps")


def test_a_wrong_value_from_a_variable_names_both_places() -> None:
    write("base.yaml", "variables:\n  lr: fast\n  steps: 16 bananas\n" + BASE.replace("lr: 1e-2", "lr: ${lr}"))
    child = write("child.yaml", 'extends: base.yaml\nstages: {pretrain: {budget: "${steps}"}, cooldown: {budget: "x ${steps}"}}\n')
    number = "input should be a valid number, unable to parse string as a number"
    assert errors(child) == [
        "child.yaml:2 (steps from base.yaml:3): stages.pretrain.budget: 'bananas' is not a unit of training; use tokens, samples or steps",
        f"base.yaml:19 (lr from base.yaml:2): stages.pretrain.optimizer.lr: 'fast': {number}",
        "child.yaml:2 (steps from base.yaml:3): stages.cooldown.budget: 'x 16 bananas' is not an amount; write for example '15T tokens', "
        "'4_096_000 samples' or '2.6M steps'",
    ]
    assert f"base.yaml:19 (lr from --set variables.lr=slow): stages.pretrain.optimizer.lr: 'slow': {number}" in errors(
        child, "variables.lr=slow"
    )


def test_an_override_may_replace_the_only_use_of_a_variable() -> None:
    text = "variables: {rate: 1}\nx: ${rate}\ny: 1\n"
    assert problems(text, "x=2") == []
    assert problems(text, "x=2", "variables.rate=3") == [
        "--set variables.rate=3: variables.rate: nothing uses this variable. Fix: remove it, or write ${rate} where it is meant."
    ]


def test_an_override_goes_into_a_mapping_that_is_a_variable_at_its_place_only() -> None:
    text = """
name: x
variables: {rates: {lr: 1e-3, betas: "${betas}"}, betas: [0.9, 0.95], same: "${rates}"}
stages: {a: {optimizer: "${rates}"}, b: {optimizer: "${same}"}, c: {matrix: {one: {}, two: {}}, optimizer: "${rates}"}}
"""
    sets = ["stages.b.optimizer.lr=2e-3", "stages.c-two.optimizer.betas.1=0.5", "variables.rates.weight_decay=0.1"]
    made = expand(parse(text, "f.yaml"), sets)
    whole = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    assert {name: stage["optimizer"] for name, stage in made.data["stages"].items()} == {
        "a": whole,
        "b": whole | {"lr": 2e-3},
        "c-one": whole,
        "c-two": whole | {"betas": [0.9, 0.5]},
    }
    assert not made.problems
    assert made.where(("stages", "b", "optimizer", "lr")) == "--set stages.b.optimizer.lr=2e-3"
    assert problems(text, "stages.a.optimizer.betas.7=1", "stages.a.optimizer.lr.x=1") == [
        "--set stages.a.optimizer.betas.7=1: the override matches nothing: there is no 'stages.a.optimizer.betas.7'",
        "--set stages.a.optimizer.lr.x=1: the override matches nothing: there is no 'stages.a.optimizer.lr.x'",
    ]


def test_mistakes_in_variables_are_reported_with_all_others() -> None:
    text = "variables: {rate: 1e-2, spare: 1}\n" + BASE.replace("lr: 1e-2", "lr: ${rat}").replace("16 steps", "${rate steps")
    assert errors(write("base.yaml", text.replace("budget: 6 steps", "bugdet: 6 steps"))) == [
        "base.yaml:15: stages.pretrain.budget: '${rate steps' has a ${ that is not closed. "
        "Fix: write ${name} for a variable, $${ for the text itself.",
        "base.yaml:17: stages.pretrain.optimizer.lr: there is no variable 'rat'. Fix: did you mean 'rate'?",
        "base.yaml:1: variables.rate: nothing uses this variable. Fix: remove it, or write ${rate} where it is meant.",
        "base.yaml:1: variables.spare: nothing uses this variable. Fix: remove it, or write ${spare} where it is meant.",
        "base.yaml:20: stages.cooldown.budget: this field is missing. Fix: state it.",
        "base.yaml:24: stages.cooldown.bugdet: there is no field 'bugdet' here. Fix: did you mean 'budget'?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "variables:\n  a: ${b}\n  b: x ${c}\n  c: ${a}\nx: ${a} ${b}\n",
            "f.yaml:2: variables.a: the variables form a cycle: a -> b -> c -> a. Fix: state one of them without the others.",
        ),
        (
            "variables: {a: '${a}'}\nx: ${a}\n",
            "f.yaml:1: variables.a: the variables form a cycle: a -> a. Fix: state one of them without the others.",
        ),
        ("x: ${matrix}\n", "f.yaml:1: x: ${matrix} is known inside a stage with a matrix only. Fix: name the variant that is meant."),
        (
            "variables: {list: [1]}\nx: a ${list}\n",
            "f.yaml:2: x: the variable 'list' is a list. Fix: let it stand alone, without text around it.",
        ),
        (
            "variables: {a: 1, b: 1}\nm:\n  ${a} x: 1\n  ${b} x: 2\n",
            "f.yaml:4: m.1 x: two keys are '1 x' when their variables are filled in. Fix: keep one.",
        ),
        ("variables: 3\nx: ${a}\n", "f.yaml:1: variables: variables are a mapping of names to values. Fix: write for example {lr: 1e-4}."),
        (
            "variables: {matrix: 1}\n",
            "f.yaml:1: variables.matrix: ${matrix} is the name of the variant in a stage with a matrix. Fix: rename it.",
        ),
        (
            "variables: {1a: 1}\nx: ${1a}\n",
            "f.yaml:1: variables.1a: '1a' is not a name. Fix: use letters, digits, _ and -, a letter first.",
        ),
    ],
)
def test_each_wrong_use_of_variables_is_one_problem(text: str, message: str) -> None:
    assert problems(text) == [message]


def test_an_override_of_a_variable_that_is_not_there_is_an_error() -> None:
    where = "--set variables.rat=1: the override matches nothing: there is no variable 'rat'."
    assert problems("variables: {rate: 1}\nx: ${rate}\n", "variables.rat=1") == [f"{where} Fix: did you mean 'rate'?"]
    assert problems("x: 1\n", "variables.rat=1") == [f"{where} Fix: there is none to choose from."]
    assert problems("variables: {rate: 1}\nx: 1\n", "variables.rate=2") == [
        "--set variables.rate=2: variables.rate: nothing uses this variable. Fix: remove it, or write ${rate} where it is meant."
    ]


def test_a_variable_that_yaml_cannot_read_unquoted_is_told_so() -> None:
    with pytest.raises(SpecError, match=r'f:1: not YAML: .* Fix: quote "\$\{\.\.\.\}" inside \{ \} and \[ \]\.'):
        parse("a: {b: ${c}}\n", "f")


# matrix

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
    stages = data("stages: {a: {lr: {x: 0}, matrix: {lr.peak: [1e-4, 0.5], seed: [1, null], note: [a b/c]}}}\n")["stages"]
    assert stages == {
        "a-1e-4-1-a_b_c": {"lr": {"x": 0, "peak": 1e-4}, "seed": 1, "note": "a b/c"},
        "a-1e-4-null-a_b_c": {"lr": {"x": 0, "peak": 1e-4}, "seed": None, "note": "a b/c"},
        "a-0.5-1-a_b_c": {"lr": {"x": 0, "peak": 0.5}, "seed": 1, "note": "a b/c"},
        "a-0.5-null-a_b_c": {"lr": {"x": 0, "peak": 0.5}, "seed": None, "note": "a b/c"},
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
      report: {after: [x, align], checkpoints: [align, x], evaluations: [align], sources: [align], from: align, other: {after: [align]}}
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
    overrides = ["stages.align.matrix.qrpo.loss.beta=7", "stages.align.seed=3", "stages.align-plain.loss.beta=9"]
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
        "--set extends=x: extends: files are merged before overrides are applied. Fix: state it in the file.",
        "--set stages.align-5.lr=1: the override matches nothing: there is no stage 'align-5'. Fix: did you mean 'align-3'?",
        "--set stages.aling.lr=1: the override matches nothing: there is no stage 'aling'. Fix: did you mean 'align'?",
        "--set stages.align.lr=4: the override matches nothing: every variant of 'align' states that field itself. "
        "Fix: set it in stages.align.matrix, or of one variant, for example align-2.",
    ]


FORMS = "write [a, b], {a: {seed: 1}, b: {seed: 2}} or {seed: [1, 2]}."


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("  a: {matrix: {}}", "2: stages.a.matrix: the matrix is empty, so there is no stage. Fix: list a variant, or remove the stage."),
        ("  a: {matrix: []}", "2: stages.a.matrix: the matrix is empty, so there is no stage. Fix: list a variant, or remove the stage."),
        ("  a: {matrix: {lr: []}}", "2: stages.a.matrix.lr: there is no value in this list. Fix: list at least one."),
        (
            "  a: {matrix: 3}",
            "2: stages.a.matrix: a matrix is a list of names, a mapping of names to the fields that they change, or of fields to lists "
            f"of values. Fix: {FORMS}",
        ),
        (
            "  a: {matrix: {x: {}, lr: [1]}}",
            "2: stages.a.matrix: a matrix has either names with the fields that they change, or fields with lists of values. "
            "Fix: write {a: {seed: 1}, b: {seed: 2}} or {seed: [1, 2]}.",
        ),
        (
            "  a:\n    matrix:\n      - x\n      - x",
            "5: stages.a.matrix[1]: two variants are named 'a-x'. Fix: keep one, or give them names.",
        ),
        ("  a: {matrix: {seed: [1, 1]}}", "2: stages.a.matrix: two variants are named 'a-1'. Fix: keep one, or give them names."),
        (
            "  a:\n    matrix:\n      x: {}\n  a-x: {}",
            "4: stages.a.matrix.x: the variant's name 'a-x' is that of another stage. Fix: rename one of the two.",
        ),
        (
            "  a: {matrix: [b-c]}\n  a-b: {matrix: [c]}",
            "3: stages.a-b.matrix[0]: the variant's name 'a-b-c' is that of another stage. Fix: rename one of the two.",
        ),
        ("  a: {matrix: [b/c]}", "2: stages.a.matrix[0]: 'b/c' is not a name. Fix: use letters, digits, _, . and -."),
        ("  a: {matrix: [{b: c}]}", "2: stages.a.matrix[0]: '{b: c}' is not a name. Fix: use letters, digits, _, . and -."),
        ("  a: {matrix: {b: {matrix: [c]}}}", "2: stages.a.matrix.b: a matrix inside a matrix. Fix: list more fields in one matrix."),
        (
            "  a: {lr: 3, matrix: {lr.x: [1]}}",
            "2: stages.a.matrix.lr.x: there is no field 'lr.x': 'lr' is not a mapping. Fix: change that one.",
        ),
        (
            "  a: {matrix: {lr..x: [1]}}",
            "2: stages.a.matrix.lr..x: 'lr..x' is not the path of a field. Fix: write for example optimizer.lr.",
        ),
        (
            "  a: {matrix: {lr: [1], lr.x: [1]}}",
            "2: stages.a.matrix.lr.x: the matrix sets this field and the whole of which it is a part. Fix: keep one.",
        ),
        (
            "  a: {matrix: {x: ['${matrix}']}}",
            "2: stages.a.matrix.x[0]: ${matrix} is known inside a stage with a matrix only. Fix: name the variant that is meant.",
        ),
        ("  a: {matrix: '${x}'}", "2: stages.a.matrix: there is no variable 'x'. Fix: there is none to choose from."),
        (
            f"  a: {{matrix: {{x: {list(range(40))}, y: {list(range(40))}}}}}",
            "2: stages.a.matrix: a matrix of 1600 stages; 1000 are allowed. Fix: shorten its lists.",
        ),
    ],
)
def test_each_wrong_matrix_is_one_problem(stages: str, message: str) -> None:
    assert problems(f"stages:\n{stages}\n") == [f"f.yaml:{message}"]


VARIANTS = """\
extends: base.yaml
stages:
  cooldown:
    optimizer:
      lr: fast
    matrix:
      short: {budget: 3 steps}
      long:
        budget: 9 bananas
        sequence_lenght: 1
  export:
    matrix: [short, long]
    from: cooldown-${matrix}
"""


def test_variants_make_a_pipeline_that_is_recorded_resolved() -> None:
    text = VARIANTS.replace("fast", "${lr}").replace("bananas", "steps").replace("        sequence_lenght: 1\n", "")
    dumped = load(write("child.yaml", text + "variables: {lr: 3e-3}\n")).model_dump(mode="json", by_alias=True)
    assert {"extends", "variables"} & set(dumped) == set()
    assert dumped["stages"]["cooldown-long"]["budget"] == "9 steps"
    assert dumped["stages"]["cooldown-long"]["optimizer"]["lr"] == 3e-3
    assert dumped["stages"]["export-short"]["from"] == "cooldown-short"
    assert "cooldown" not in dumped["stages"]
    assert "matrix" not in json.dumps(dumped)


def test_an_error_in_a_variant_points_to_where_the_field_is_written_and_a_shared_one_is_said_once() -> None:
    assert errors(write("child.yaml", VARIANTS)) == [
        "child.yaml:5: stages.cooldown-short.optimizer.lr: 'fast': input should be a valid number, unable to parse string as a number",
        "child.yaml:9: stages.cooldown-long.budget: 'bananas' is not a unit of training; use tokens, samples or steps",
        "child.yaml:10: stages.cooldown-long.sequence_lenght: there is no field 'sequence_lenght' here. "
        "Fix: did you mean 'sequence_length'?",
    ]


def test_an_error_in_a_grid_points_to_the_value_in_its_list() -> None:
    grid = "    matrix:\n      optimizer.lr:\n        - 1e-3\n        - fast\n      seqence_length: [32]\n"
    text = BASE.replace("    budget: 6 steps\n", "    budget: 6 steps\n" + grid)
    assert errors(write("base.yaml", text)) == [
        "base.yaml:28: stages.cooldown-1e-3-32.seqence_length: there is no field 'seqence_length' here. "
        "Fix: did you mean 'sequence_length'?",
        "base.yaml:27: stages.cooldown-fast-32.optimizer.lr: 'fast': input should be a valid number, unable to parse string as a number",
        "base.yaml:29: stages.export.from: stage 'cooldown' is a matrix of cooldown-1e-3-32, cooldown-fast-32; name one of them",
    ]


def test_a_reference_to_a_stage_that_is_a_matrix_names_the_variants() -> None:
    text = VARIANTS.replace("fast", "1e-3").replace("9 bananas", "9 steps").replace("        sequence_lenght: 1\n", "")
    text = text.replace("    matrix: [short, long]\n    from: cooldown-${matrix}\n", "    after: [cooldown]\n")
    assert errors(write("child.yaml", text)) == [
        "base.yaml:24: stages.export.from: stage 'cooldown' is a matrix of cooldown-short, cooldown-long; name one of them"
    ]
    text = text.replace("after: [cooldown]", "after: [cooldown]\n    from: cooldown-lang")
    assert errors(write("child.yaml", text)) == [
        "child.yaml:12: stages.export.from: there is no stage 'cooldown-lang'. Fix: did you mean 'cooldown-long'?"
    ]
    text = text.replace("cooldown-lang", "cooldown-long")
    assert stage(load(write("child.yaml", text)), "export").after == ["cooldown-short", "cooldown-long"]


def test_a_wrong_matrix_does_not_hide_other_problems() -> None:
    text = VARIANTS.replace("long:", "so/long:") + "  main: {sed: 1}\n"
    assert errors(write("child.yaml", text)) == [
        "child.yaml:8: stages.cooldown.matrix.so/long: 'so/long' is not a name. Fix: use letters, digits, _, . and -.",
        "child.yaml:14: stages.main.sed: there is no field 'sed' here. Fix: did you mean 'seed'?",
        "child.yaml:13: stages.export-long.from: there is no stage 'cooldown-long'. Fix: use one of pretrain.",
    ]


@pytest.mark.parametrize(("wrong", "right"), [("extend", "extends"), ("variabels", "variables"), ("mtrix", "matrix")])
def test_the_keys_of_composing_are_among_the_nearest_names(wrong: str, right: str) -> None:
    text = f"{wrong}: x\n" + BASE if wrong != "mtrix" else BASE.replace("    budget: 6 steps\n", "    budget: 6 steps\n    mtrix: [a]\n")
    assert [f"Fix: did you mean '{right}'?" in line for line in errors(write("base.yaml", text))] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "variables: {v0: x, " + ", ".join(f"v{n}: '${{v{n - 1}}}${{v{n - 1}}}'" for n in range(1, 40)) + "}\nx: ${v39}\n",
        "variables: {v0: [x, x], " + ", ".join(f"v{n}: ['${{v{n - 1}}}', '${{v{n - 1}}}']" for n in range(1, 40)) + "}\nx: ${v39}\n",
        f"stages: {{a: {{x: {list(range(200))}, matrix: {{y: {list(range(900))}}}}}}}\n",
    ],
)
def test_what_multiplies_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=f"more than {MAX_VALUES} values"):
        expand(parse(text, "f"))


def test_variables_that_use_each_other_endlessly_are_refused() -> None:
    text = "variables: {v0: x, " + ", ".join(f"v{n}: '${{v{n + 1}}}'" for n in range(1, 400)) + ", v400: y}\nx: ${v0} ${v1}\n"
    assert "more than 50 variables use each other" in problems(text)[0]


def test_a_document_without_origins_can_be_composed() -> None:
    made = expand(Document("f", {"variables": {"a": 1e-4, "b": True}, "x": "${a} ${b}", "stages": {"s": {"matrix": ["v"]}}}))
    assert made.data == {"x": "0.0001 true", "stages": {"s-v": {}}}


# the schema for editors

SCHEMA = Draft202012Validator(json_schema())
RECIPES = sorted((Path(__file__).parents[2] / "specs" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_schema_allows_every_recipe(recipe: Path) -> None:
    Draft202012Validator.check_schema(SCHEMA.schema)
    assert list(SCHEMA.iter_errors(YAML(typ="safe").load(recipe))) == []


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (BASE, True),
        (VARIANTS.replace("fast", "1").replace("9 bananas", "9 steps").replace("        sequence_lenght: 1\n", ""), True),
        (VARIANTS.replace("fast", "1"), False),
        (BASE.replace("lr: 1e-2", "lr: ${lr}").replace("16 steps", "${n} bananas") + "variables: {lr: 1}\n", True),
        (BASE.replace("lr: 1e-2", "lr: fast"), False),
        (BASE.replace("    budget: 6 steps\n", ""), False),
        (BASE.replace("    budget: 6 steps\n", "    matrix: {a: {budget: 6 steps}, b: {budget: 7 steps}}\n"), True),
        (BASE.replace("    budget: 6 steps\n", "    budget: 6 steps\n    matrix: {optimizer.lr: [1e-3], sequence_length: '${x}'}\n"), True),
        (BASE.replace("    budget: 6 steps\n", "    matrix: {a: {bugdet: 6 steps}}\n"), False),
        (BASE.replace("    budget: 6 steps\n", "    matrix: []\n"), False),
        ("stages: {pretrain: {optimizer: {lr: 1}, goldfish: null}, export: null}\nextends: base.yaml\n", True),
        ("stages: {pretrain: {optimizer: {lrr: 1}}}\nextends: base.yaml\n", False),
        ("sources: {notes: {limit: 3}}\nstages: {}\nextends: base.yaml\n", True),
        ("sources: {notes: {limit: 3}}\nstages: {}\n", False),
        ("extends: 3\n", False),
    ],
)
def test_the_schema_knows_what_files_may_leave_to_others(text: str, valid: bool) -> None:
    assert (list(SCHEMA.iter_errors(parse(text, "f").data)) == []) is valid
