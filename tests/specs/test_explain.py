"""What Pydantic refuses is a problem that names place, value and fix. The places are those of the models'
JSON Schema, which Pydantic makes beside the schema that errors are explained by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specs.document import Document
from specs.errors import Problem, dotted
from specs.explain import explain
from specs.pipeline import Pipeline
from tests.recipes import problems, write_recipe
from tests.specs.every_field import Place, places

PLACES = places()
UNIONS = [place for place in PLACES if "discriminator" in place.schema]


def explained(document: Document) -> list[Problem]:
    """The problems of a document in the fields themselves."""
    with pytest.raises(ValidationError) as caught:
        Pipeline.model_validate(document.data)
    return explain(Pipeline, document, caught.value)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "stages.cooldown.optimizer.lrr=1",
            "the override matches nothing: there is no field 'lrr' here. Fix: did you mean 'lr'?",
        ),
        (
            "stages.cooldwn.budget=1 steps",
            "the override matches nothing: there is no stage 'cooldwn'. Fix: did you mean 'cooldown'?",
        ),
        (
            "lunch.processes=2",
            "the override matches nothing: there is no field 'lunch' here. Fix: did you mean 'launch'?",
        ),
    ],
)
def test_an_override_that_matches_nothing_is_an_error(tmp_path: Path, assignment: str, message: str) -> None:
    text = problems(write_recipe(tmp_path), assignment)
    assert message in text
    assert f"--set {assignment}" in text


@pytest.mark.parametrize("value", [[[[]]], {"?": [[]]}], ids=["list", "mapping"])
def test_a_value_of_a_wrong_type_is_named_with_its_place_whatever_the_field(value: Any) -> None:
    tried = [place for place in PLACES if place.of and not place.accepts(value)]
    assert len(tried) > 600
    for place in tried:
        document = place.document(value)
        found = [one for one in explained(document) if one.path[: len(place.path)] == place.path]
        assert found, dotted(place.path)
        for problem in found:
            missing = problem.message == "this field is missing"
            where = document.where(problem.path[:-1] if missing else problem.path)
            assert str(problem).startswith(f"{where}: {dotted(place.path)}")
            assert "nput should" not in problem.message and " valid " not in problem.message


def test_true_is_no_number_whatever_the_field() -> None:
    """Python takes it for 1."""
    tried = [place for place in PLACES if place.of and place.accepts(3) and not place.accepts(True)]
    assert len(tried) > 200
    for place in tried:
        problems = [
            one for one in explained(place.document(True)) if one.path[: len(place.path)] == place.path
        ]
        assert problems, dotted(place.path)


def test_a_missing_field_is_named_with_the_line_of_what_lacks_it() -> None:
    count = 0
    for place in PLACES:
        required = {
            field for field in place.schema.get("required", ()) if (*place.path, field) not in place.tags
        }
        if not required:
            continue
        document = place.document({})
        for field in required:
            path = (*place.path, field)
            where = document.where(place.path)
            assert Problem(path, "this field is missing", "set it.", where) in explained(document), dotted(
                path
            )
            count += 1
    assert count > 150


@pytest.mark.parametrize("union", UNIONS, ids=lambda union: dotted(union.path))
@pytest.mark.parametrize("stated", ["no such", ["no such"], {"no such": 1}, None, 3, True])
def test_a_wrong_choice_lists_all_that_there_are(union: Place, stated: Any) -> None:
    chooses = union.schema["discriminator"]
    tag, choices = chooses["propertyName"], sorted(chooses["mapping"])
    found = [one for one in explained(union.document({tag: stated})) if one.path[:-1] == union.path]
    assert [one.path[-1] for one in found] == [tag]
    assert found[0].fix == f"use one of {', '.join(choices)}."
    (missing,) = [one for one in explained(union.document({})) if one.path == (*union.path, tag)]
    assert missing.message == "this field is missing"
    assert sorted(missing.fix.removeprefix("set it to one of ").rstrip(".").split(", ")) == choices
