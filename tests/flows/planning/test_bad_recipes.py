"""Whatever is done to a recipe, the answer is a plan or a list of problems, never another exception."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.planning.plan import make
from infra.store import Store
from specs.document import Document, read
from specs.errors import SpecError
from specs.recipe import load, validate
from tests.machine import slow

VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3.5,
        1e-4,
        10**30,
        float("inf"),
        "",
        "x",
        "a b",
        "évaluer",
        "10 steps",
        "3 bananas",
        "5k tokens",
    ),
    *(
        "main",
        "pretrain",
        "corpus/notes",
        "pretrain@step=3",
        "pretrain@step=0",
        "installed:nothing",
        "/nowhere",
        "nonsense://x",
    ),
    *("${lr}", "${x}", "a ${lr} b", "$${", "${", "cooldown-${matrix}", "base.yaml"),
    *({"a": {}, "b": None}, {"optimizer.lr": [1e-4, 2e-4]}, ["a", "b"], {"lr": "${lr}"}),
    *(
        [],
        ["x"],
        [1],
        [[]],
        {},
        {"x": 1},
        {"0 tokens": "main"},
        {"5 steps": 4},
        {"kind": "export"},
        {"kind": "mixture", "weights": {}},
    ),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, item in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(item, (*path, key))


def mutate(data: dict[str, Any], chance: random.Random) -> None:
    """Replaces, removes or adds one value somewhere."""
    path = chance.choice(list(places(data)))
    container: Any = data
    for key in path[:-1]:
        container = container[key]
    how = chance.random()
    if how < 0.7:
        container[path[-1]] = copy.deepcopy(chance.choice(VALUES))
    elif how < 0.85:
        del container[path[-1]]
    elif isinstance(container, dict):
        container[
            chance.choice(
                ["x", "kind", "from", "after", "lr", "0 tokens", "matrix", "variables", "extends", "${lr}"]
            )
        ] = copy.deepcopy(chance.choice(VALUES))


@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
def test_a_mutated_recipe_is_planned_or_refused_with_problems(recipe: Path, store: Store, seed: int) -> None:
    document, chance, refused = read(recipe), random.Random(seed), 0
    for _ in range(100):
        data = copy.deepcopy(document.data)
        for _ in range(chance.choice([1, 1, 2, 3])):
            mutate(data, chance)
        try:
            make(validate(Document(document.name, data, document.origins)), store)
        except SpecError as error:
            refused += 1
            assert error.problems
            assert all(problem.message for problem in error.problems)
    assert refused > 50


COMPOSED: dict[str, Any] = {
    "extends": "tiny.yaml",
    "variables": {"lr": 1e-3, "again": "${lr}", "steps": 6, "variants": ["a", "b"]},
    "stages": {
        "cooldown": {
            "budget": "${steps} steps",
            "matrix": {"a": {"optimizer": {"lr": "${again}"}}, "b": {"checkpoint": None}},
        },
        "evaluate": {"from": "cooldown-${matrix}", "matrix": "${variants}"},
        "grid": {
            "kind": "mixture",
            "weights": {"corpus/notes": 1},
            "matrix": {"seed": [1, 2], "max_repetition": [100, 1e3]},
        },
        "export": {"from": "cooldown-a"},
    },
}


@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
def test_a_mutated_composed_recipe_is_planned_or_refused_with_problems(
    recipe: Path, store: Store, seed: int
) -> None:
    chance, refused = random.Random(seed), 0
    child = recipe.parent / "child.yaml"
    for round in range(60):
        data = copy.deepcopy(COMPOSED)
        for _ in range(min(round, chance.choice([1, 1, 2, 3]))):
            mutate(data, chance)
        child.write_text(json.dumps(data))
        overrides = (
            [".".join(map(str, chance.choice(list(places(COMPOSED))))) + "=7"]
            if chance.random() < 0.3 and round
            else []
        )
        try:
            make(load(child, overrides), store)
        except SpecError as error:
            refused += 1
            assert round, str(error)
            assert error.problems
            assert all(problem.message and problem.where for problem in error.problems)
    assert refused > 30


URLS = """
s3://user:Zq7kX@bucket/x s3://user:ab/Zq7kX@bucket/x s3://user:ab@Zq7kX@bucket/x https://Zq7kX@host/x
https://host/x?key=Zq7kX https://host/x#access_token=Zq7kX
"""
TEXTS = """
store=URL description=URL sources.notes.url=URL sources.notes.include=[URL] sources.notes.license=URL
stages.tokenizer.from=hf:URL tracking.tensorboard=URL assumed_inputs.files=[URL]
"""
OTHERS = (
    "name=URL extends=URL nonsense=URL URL=1 launch.processes=URL stages.pretrain.budget=URL"
    " stages.pretrain.from=URL"
)


@pytest.mark.parametrize("url", [*URLS.split(), "s3://user:a b/Zq7kX@bucket"])
def test_credentials_in_a_url_are_refused_in_every_field_of_text(recipe: Path, url: str) -> None:
    for field in TEXTS.split():
        assignment = field.replace("URL", json.dumps(url)).replace('hf:"', '"hf:')
        with pytest.raises(SpecError, match="a URL with credentials in it; leave them out") as caught:
            load(recipe, [assignment])
        assert "Zq7kX" not in str(caught.value)


@pytest.mark.parametrize("url", URLS.split())
@pytest.mark.parametrize("field", OTHERS.split())
def test_credentials_in_a_url_are_not_repeated_whatever_is_wrong_with_it(
    recipe: Path, field: str, url: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load(recipe, [field.replace("URL", url)])
    assert "Zq7kX" not in str(caught.value)


@pytest.mark.parametrize("url", URLS.split())
def test_credentials_in_a_file_are_refused_with_its_line(recipe: Path, url: str) -> None:
    recipe.write_text(f"{recipe.read_text()}\nstore: {json.dumps(url)}\n")
    line = len(recipe.read_text().splitlines())
    with pytest.raises(SpecError, match=f"{recipe.name}:{line}: store: a URL with credentials in it"):
        load(recipe)
