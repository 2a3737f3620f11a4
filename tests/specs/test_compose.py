"""`extends`: what a file that extends another makes, and where its errors point."""

from __future__ import annotations

import pytest

from specs.recipe import load
from tests.specs.composing import BASE, errors, write

pytestmark = pytest.mark.usefixtures("beside_the_base")


def test_extended_files_form_a_chain_of_relative_paths() -> None:
    write("folder/middle.yaml", "extends: ../base.yaml\nname: middle\nconcurrency: 2\n")
    pipeline = load(write("child.yaml", "extends: folder/middle.yaml\nname: child\n"))
    assert (pipeline.name, pipeline.concurrency, len(pipeline.stages)) == ("child", 2, 6)


def test_error_names_the_file_of_the_wrong_value() -> None:
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
        (
            "child.yaml:4: stages.pretrain.budget: 'bananas' is not a unit of training; use tokens, samples"
            " or steps"
        ),
        (
            "base.yaml:17: stages.pretrain.optimizer.weight_decay: 'heavy' is not a number. Fix: write a"
            " number, such as 0.1."
        ),
        "child.yaml:6: stages.cooldown.form: there is no field 'form' here. Fix: did you mean 'from'?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: a\nextends: bsae.yaml\n",
            "child.yaml:2: extends: there is no file 'bsae.yaml'. Fix: did you mean 'base.yaml'?",
        ),
        ("extends: 3\n", "child.yaml:1: extends: 3 is not a file. Fix: name one file, relative to this one."),
        (
            "extends: [base.yaml]\n",
            "child.yaml:1: extends: ['base.yaml'] is not a file. Fix: name one file, relative to this one.",
        ),
        (
            'extends: "a\\0b"\n',
            "child.yaml:1: extends: there is no file 'a\0b'. Fix: use one of bad.yaml, base.yaml, loop.yaml.",
        ),
        ("extends: bad.yaml\n", "bad.yaml:2: not YAML: did not find expected node content."),
        (
            "\nextends: child.yaml\n",
            "child.yaml:2: extends: the files extend each other: child.yaml -> child.yaml.",
        ),
        (
            "extends: loop.yaml\n",
            "loop.yaml:2: extends: the files extend each other: loop.yaml -> loop.yaml.",
        ),
    ],
)
def test_error_about_extends_names_file_and_line(text: str, message: str) -> None:
    write("bad.yaml", "a: [\n")
    write("loop.yaml", "name: loop\nextends: ./loop.yaml\n")
    found = errors(write("child.yaml", text))
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_cycle_of_files_is_named_as_a_whole() -> None:
    for one, other in (("a", "b"), ("b", "c"), ("c", "a")):
        write(f"{one}.yaml", f"name: {one}\nextends: {other}.yaml\n")
    cycle = "the files extend each other: a.yaml -> b.yaml -> c.yaml -> a.yaml"
    assert errors("a.yaml") == [f"c.yaml:2: extends: {cycle}. Fix: let one of them extend none."]
