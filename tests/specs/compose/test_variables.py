"""`variables`: what is filled in, what is refused, and where errors point."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.compose import expand
from specs.document import MAX_VALUES, Document, parse
from specs.errors import SpecError
from specs.recipe import load
from tests.specs.composing import BASE, data, errors, problems, stage, write

pytestmark = pytest.mark.usefixtures("beside_the_base")


def test_a_variable_alone_keeps_its_type_and_inside_a_text_it_is_as_written() -> None:
    text = """\
    variables: {lr: 1e-4, n: 4_096, quoted: '12', on: true, none: null, list: [1, "${n}"], map: {a: 1}}
    alone: {lr: "${lr}", n: '${n}', quoted: "${quoted}", on: "${on}", none: "${none}", list: "${list}",
      map: "${map}"}
    inside: x${lr}-${n} ${quoted}${on}${none}
    items:
      - ${n} steps
    "${n} samples": first
    """
    assert data(text) == {
        "alone": {
            "lr": 1e-4,
            "n": 4096,
            "quoted": "12",
            "on": True,
            "none": None,
            "list": [1, 4096],
            "map": {"a": 1},
        },
        "inside": "x1e-4-4_096 12truenull",
        "items": ["4_096 steps"],
        "4_096 samples": "first",
    }


def test_two_dollars_escape_a_variable() -> None:
    assert data("variables: {a: 1, b: '$${a}'}\nx: $${a} ${a} $$${a} $ {\ny: ${b}\n") == {
        "x": "${a} 1 $${a} $ {",
        "y": "${a}",
    }


def test_variables_use_others_are_inherited_and_overridden() -> None:
    write(
        "base.yaml",
        "variables: {steps: 16, budget: '${steps} steps', unused: 1}\n"
        + BASE.replace("16 steps", "${budget}"),
    )
    child = write("child.yaml", "extends: base.yaml\nname: run-${steps}\nvariables: {steps: 20}\n")
    assert str(stage(load(child), "pretrain").budget) == "20 steps"
    overridden = load(child, ["variables.steps=30"])
    assert (overridden.name, str(stage(overridden, "pretrain").budget)) == ("run-30", "30 steps")


def test_the_text_of_a_file_is_relative_to_the_file_that_names_it_and_in_set_to_the_current_folder() -> None:
    write("shared/words/question.txt", "{# Our own. #}\nIs {answer} ${right}?\n{# not at the beginning #}\n")
    write("words/other.txt", "Right: {answer}?\n")
    write(
        "shared/base.yaml",
        "variables:\n  question: ${text:words/question.txt}\n"
        + BASE.replace("name: base", "name: run\ndescription: A ${question} B"),
    )
    child = write("child.yaml", "extends: shared/base.yaml\n")
    assert load(child).description == "A Is {answer} ${right}?\n{# not at the beginning #} B"
    assert load(child, ["variables.question=${text:words/other.txt}"]).description == "A Right: {answer}? B"
    write("child.yaml", "extends: shared/base.yaml\ndescription: ${text:words/question.txt}\n")
    Path("latin.txt").write_bytes(b"\xe9")
    fix = "name a text file in UTF-8, relative to the file that names it; in --set, to this folder."
    assert errors("child.yaml") == [
        "child.yaml:2: description: cannot read 'words/question.txt': No such file or directory. Fix: " + fix
    ]
    (wrong,) = errors("child.yaml", "description=${text:latin.txt}")
    assert wrong.startswith(
        "--set description=${text:latin.txt}: description: cannot read 'latin.txt': 'utf-8'"
    )
    (wrong,) = errors("child.yaml", "description=short", "name=${text:words/other.txt}")
    assert wrong.startswith("--set name=${text:words/other.txt}: name: 'Right: {answer}?'")
    (wrong,) = errors("child.yaml", "description=${text:}")
    assert "cannot read '.': " in wrong


def test_a_wrong_value_from_a_variable_names_both_places() -> None:
    write(
        "base.yaml", "variables:\n  lr: fast\n  steps: 16 bananas\n" + BASE.replace("lr: 1e-2", "lr: ${lr}")
    )
    child = write(
        "child.yaml",
        'extends: base.yaml\nstages: {pretrain: {budget: "${steps}"}, cooldown: {budget: "x ${steps}"}}\n',
    )
    number = "is not a number. Fix: write a number, such as 0.1."
    assert errors(child) == [
        (
            "child.yaml:2 (steps from base.yaml:3): stages.pretrain.budget: 'bananas' is not a unit of"
            " training; use tokens, samples or steps"
        ),
        f"base.yaml:19 (lr from base.yaml:2): stages.pretrain.optimizer.lr: 'fast' {number}",
        (
            "child.yaml:2 (steps from base.yaml:3): stages.cooldown.budget: 'x 16 bananas' is not an amount;"
            " write for example '15T tokens', '4_096_000 samples' or '2.6M steps'"
        ),
    ]
    assert (
        f"base.yaml:19 (lr from --set variables.lr=slow): stages.pretrain.optimizer.lr: 'slow' {number}"
        in errors(child, "variables.lr=slow")
    )


def test_an_override_may_replace_the_only_use_of_a_variable() -> None:
    text = "variables: {rate: 1}\nx: ${rate}\ny: 1\n"
    assert problems(text, "x=2") == []
    assert problems(text, "x=2", "variables.rate=3") == [
        "--set variables.rate=3: variables.rate: nothing uses this variable. Fix: remove it, or write ${rate}"
        " where it is meant."
    ]


def test_override_changes_a_variable_mapping_only_at_its_place() -> None:
    text = """
name: x
variables: {rates: {lr: 1e-3, betas: "${betas}"}, betas: [0.9, 0.95], same: "${rates}"}
stages: {a: {optimizer: "${rates}"}, b: {optimizer: "${same}"},
         c: {matrix: {one: {}, two: {}}, optimizer: "${rates}"}}
"""
    sets = [
        "stages.b.optimizer.lr=2e-3",
        "stages.c-two.optimizer.betas.1=0.5",
        "variables.rates.weight_decay=0.1",
    ]
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
        (
            "--set stages.a.optimizer.betas.7=1: the override matches nothing: there is no"
            " 'stages.a.optimizer.betas.7'"
        ),
        (
            "--set stages.a.optimizer.lr.x=1: the override matches nothing: there is no"
            " 'stages.a.optimizer.lr.x'"
        ),
    ]


def test_mistakes_in_variables_are_reported_with_all_others() -> None:
    text = "variables: {rate: 1e-2, spare: 1}\n" + BASE.replace("lr: 1e-2", "lr: ${rat}").replace(
        "16 steps", "${rate steps"
    )
    assert errors(write("base.yaml", text.replace("budget: 6 steps", "bugdet: 6 steps"))) == [
        (
            "base.yaml:15: stages.pretrain.budget: '${rate steps' has a ${ that is not closed. "
            "Fix: write ${name} for a variable, $${ for the text itself."
        ),
        "base.yaml:17: stages.pretrain.optimizer.lr: there is no variable 'rat'. Fix: did you mean 'rate'?",
        (
            "base.yaml:1: variables.rate: nothing uses this variable. Fix: remove it, or write ${rate} where"
            " it is meant."
        ),
        (
            "base.yaml:1: variables.spare: nothing uses this variable. Fix: remove it, or write ${spare}"
            " where it is meant."
        ),
        "base.yaml:20: stages.cooldown.budget: this field is missing. Fix: set it.",
        "base.yaml:24: stages.cooldown.bugdet: there is no field 'bugdet' here. Fix: did you mean 'budget'?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "variables:\n  a: ${b}\n  b: x ${c}\n  c: ${a}\nx: ${a} ${b}\n",
            (
                "f.yaml:2: variables.a: the variables form a cycle: a -> b -> c -> a. Fix: set one of them"
                " without the others."
            ),
        ),
        (
            "variables: {a: '${a}'}\nx: ${a}\n",
            (
                "f.yaml:1: variables.a: the variables form a cycle: a -> a. Fix: set one of them without"
                " the others."
            ),
        ),
        (
            "x: ${matrix}\n",
            "f.yaml:1: x: ${matrix} is known only inside a stage with a matrix. Fix: name the variant.",
        ),
        (
            "variables: {list: [1]}\nx: a ${list}\n",
            "f.yaml:2: x: the variable 'list' is a list. Fix: write it alone, without text around it.",
        ),
        (
            "variables: {a: 1, b: 1}\nm:\n  ${a} x: 1\n  ${b} x: 2\n",
            "f.yaml:4: m.1 x: two keys are '1 x' when their variables are filled in. Fix: keep one.",
        ),
        (
            "variables: 3\nx: ${a}\n",
            (
                "f.yaml:1: variables: variables are a mapping of names to values. Fix: write for example {lr:"
                " 1e-4}."
            ),
        ),
        (
            "variables: {matrix: 1}\n",
            (
                "f.yaml:1: variables.matrix: ${matrix} is the name of the variant in a stage with a matrix."
                " Fix: rename it."
            ),
        ),
        (
            "variables: {1a: 1}\nx: ${1a}\n",
            "f.yaml:1: variables.1a: '1a' is not a name. Fix: use letters, digits, _ and -, a letter first.",
        ),
    ],
)
def test_each_wrong_use_of_variables_is_one_problem(text: str, message: str) -> None:
    assert problems(text) == [message]


def test_override_of_a_missing_variable_is_an_error() -> None:
    where = "--set variables.rat=1: the override matches nothing: there is no variable 'rat'."
    assert problems("variables: {rate: 1}\nx: ${rate}\n", "variables.rat=1") == [
        f"{where} Fix: did you mean 'rate'?"
    ]
    assert problems("x: 1\n", "variables.rat=1") == [f"{where} Fix: there is none to choose from."]
    assert problems("variables: {rate: 1}\nx: 1\n", "variables.rate=2") == [
        "--set variables.rate=2: variables.rate: nothing uses this variable. Fix: remove it, or write ${rate}"
        " where it is meant."
    ]


def test_error_asks_to_quote_a_variable_that_yaml_cannot_read() -> None:
    with pytest.raises(
        SpecError, match=r'f:1: not YAML: .* Fix: quote "\$\{\.\.\.\}" inside \{ \} and \[ \]\.'
    ):
        parse("a: {b: ${c}}\n", "f")


@pytest.mark.parametrize(
    "text",
    [
        "variables: {v0: x, "
        + ", ".join(f"v{n}: '${{v{n - 1}}}${{v{n - 1}}}'" for n in range(1, 40))
        + "}\nx: ${v39}\n",
        "variables: {v0: [x, x], "
        + ", ".join(f"v{n}: ['${{v{n - 1}}}', '${{v{n - 1}}}']" for n in range(1, 40))
        + "}\nx: ${v39}\n",
        f"stages: {{a: {{x: {list(range(200))}, matrix: {{y: {list(range(900))}}}}}}}\n",
    ],
)
def test_exponential_expansion_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=f"more than {MAX_VALUES} values"):
        expand(parse(text, "f"))


def test_cyclic_variables_are_refused() -> None:
    text = (
        "variables: {v0: x, "
        + ", ".join(f"v{n}: '${{v{n + 1}}}'" for n in range(1, 400))
        + ", v400: y}\nx: ${v0} ${v1}\n"
    )
    assert "more than 50 variables use each other" in problems(text)[0]


def test_a_document_without_origins_can_be_composed() -> None:
    made = expand(
        Document(
            "f", {"variables": {"a": 1e-4, "b": True}, "x": "${a} ${b}", "stages": {"s": {"matrix": ["v"]}}}
        )
    )
    assert made.data == {"x": "0.0001 true", "stages": {"s-v": {}}}
