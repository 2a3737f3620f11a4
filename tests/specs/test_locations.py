"""Relative paths of a recipe begin in the folder of the file that states them, wherever a command runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from specs.base import Spec, facts_of
from specs.document import Document, Origin
from specs.locations import absolute, absolute_model, located
from specs.pipeline import Pipeline
from specs.profiles import Profile, load_profile
from specs.recipe import load
from specs.stages import STAGES
from tests.specs.composing import write

BASE = """\
name: base
variables: {data: data}
store: results
sources:
  own: {url: texts, format: text}
  below: {url: "${data}/below", format: text}
  alone: {url: "${data}", format: text}
stages:
  tokenizer: {kind: tokenizer, sources: [own, below, alone], vocab_size: 512}
"""
NO_PATHS = {
    "Axis.label", "Axis.metric", "Axis.stage", "Checkpointing.best", "Claim.cannot", "Claim.of",
    "Claim.paper", "Claim.than", "FigureSpec.against", "FigureSpec.claims",
    "FigureSpec.series", "FigureSpec.text", "FigureSpec.times", "FigureSpec.title", "Gate.metric",
    "Measuring.reference", "ModelSpec.flavour", "Pipeline.description", "Pipeline.figures", "Pipeline.name",
    "Pipeline.silence", "PublishedScore.source", "RobotsSource.include", "Server.key", "Server.proxy",
    "Server.url", "SourceSpec.exclude", "SourceSpec.include", "SourceSpec.language", "SourceSpec.license",
    "SourceSpec.tokenizer", "Stage.after", "Stage.description", "Stage.silence", "WandbSpec.entity",
    "WandbSpec.project", "Workers.memory",
}  # fmt: skip
"""Execution fields of recipes whose texts are no paths."""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, beside `base/base.yaml` and `child/child.yaml`, which extends it."""
    monkeypatch.chdir(tmp_path)
    write("base/base.yaml", BASE)
    write("child/child.yaml", "extends: ../base/base.yaml\nname: child\n")
    here = tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def urls(path: Path, *overrides: str) -> dict[str, str]:
    return {name: source.url for name, source in load(path, overrides).sources.items()}


@pytest.mark.parametrize("recipe", ["base/base.yaml", "child/child.yaml"])
def test_a_path_begins_in_the_folder_of_the_file_that_states_it(
    elsewhere: Path, tmp_path: Path, recipe: str
) -> None:
    base = tmp_path / "base"
    assert urls(tmp_path / recipe) == {
        "own": f"{base}/texts",
        "below": f"{base}/data/below",
        "alone": f"{base}/data",
    }
    assert load(tmp_path / recipe).store == f"{base}/results"
    assert urls(Path("..") / recipe) == urls(tmp_path / recipe)


def test_a_path_that_begins_with_a_variable_begins_where_the_variable_is_stated(
    elsewhere: Path, tmp_path: Path
) -> None:
    child = tmp_path / "child" / "child.yaml"
    child.write_text(
        "extends: ../base/base.yaml\nvariables: {data: more, where: in}\n"
        'sources: {own: {url: "texts/${where}"}}\n'
    )
    assert urls(child) == {
        "own": f"{tmp_path}/child/texts/in",
        "below": f"{tmp_path}/child/more/below",
        "alone": f"{tmp_path}/child/more",
    }


def test_paths_of_the_command_line_and_the_default_store_begin_in_the_current_folder(
    elsewhere: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base" / "base.yaml"
    assert urls(base, "variables.data=given", "sources.own.url=../up") == {
        "own": f"{tmp_path}/up",
        "below": f"{elsewhere}/given/below",
        "alone": f"{elsewhere}/given",
    }
    base.write_text(BASE.replace("store: results\n", ""))
    assert load(base).store == f"{elsewhere}/apertus-store"


def test_variants_of_a_matrix_have_the_paths_of_their_file(elsewhere: Path, tmp_path: Path) -> None:
    child = tmp_path / "child" / "child.yaml"
    child.write_text(
        "extends: ../base/base.yaml\nstages:\n  tokenizer: null\n"
        "  imported: {kind: tokenizer, matrix: {a: {path: a}, b: {path: '${data}/${matrix}'}}}\n"
        "  listed: {kind: tokenizer, matrix: {path: [../c]}}\n"
    )
    stages = load(child).stages
    assert {name: stage.path for name, stage in stages.items()} == {  # type: ignore[attr-defined]  # tokenizers
        "imported-a": f"{tmp_path}/child/a",
        "imported-b": f"{tmp_path}/base/data/b",
        "listed-.._c": f"{tmp_path}/c",
    }


def test_a_model_of_hugging_face_is_a_folder_or_a_name_of_the_hub(elsewhere: Path, tmp_path: Path) -> None:
    base = tmp_path / "base" / "base.yaml"
    (tmp_path / "base" / "own" / "model").mkdir(parents=True)
    base.write_text(
        BASE + "  folder: {kind: tokenizer, from: 'hf:own/model'}\n"
        "  deep: {kind: tokenizer, from: 'hf:./own/model'}\n"
        "  hub: {kind: tokenizer, from: 'hf:owner/name@main'}\n"
        "  given: {kind: tokenizer, from: 'hf:${models}/a/b'}\n"
        "assumed_inputs:\n  models:\n    hf:${models}/a/b: {context: 8}\n    hf:owner/name: {context: 8}\n"
    )
    base.write_text(base.read_text().replace("{data: data}", "{data: data, models: models}"))
    recipe = load(base, ["variables.models=./given"])
    assert {
        name: str(stage.from_)  # type: ignore[attr-defined]  # tokenizers
        for name, stage in recipe.stages.items()
        if name != "tokenizer"
    } == {
        "folder": f"hf:{tmp_path}/base/own/model",
        "deep": f"hf:{tmp_path}/base/own/model",
        "hub": "hf:owner/name@main",
        "given": f"hf:{elsewhere}/given/a/b",
    }
    assert set(recipe.assumed_inputs.models) == {f"hf:{elsewhere}/given/a/b", "hf:owner/name"}


@pytest.mark.parametrize(
    "path", ["/data", "~/data", "s3://bucket/data", "file:///data", "installed:stdlib", "hf://datasets/a/b@1"]
)
def test_absolute_paths_and_urls_stay_as_they_are(path: str) -> None:
    assert absolute(path, "/folder") == path
    assert absolute_model(f"hf:{path}", "/folder") == f"hf:{path}"


def test_a_path_that_leaves_a_linked_folder_is_found_as_the_system_finds_it(tmp_path: Path) -> None:
    (tmp_path / "real" / "recipes").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "recipes")
    assert absolute("../texts", str(tmp_path / "link")) == f"{tmp_path}/real/texts"
    assert absolute("./texts/", str(tmp_path / "link")) == f"{tmp_path}/link/texts"


def test_the_folder_of_attempts_in_a_profile_begins_beside_the_profile(
    elsewhere: Path, tmp_path: Path
) -> None:
    (tmp_path / "profile.yaml").write_text("scratch: scratch\n")
    assert load_profile(tmp_path / "profile.yaml").scratch == f"{tmp_path}/scratch"


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model, and all models that its fields can have."""

    def of(annotation: object) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from models(annotation)
        for argument in get_args(annotation):
            yield from of(argument)

    yield model
    for info in model.model_fields.values():
        yield from of(info.annotation)


MODELS = sorted(
    {one for root in [Pipeline, Profile, *STAGES.values()] for one in models(root)},
    key=lambda one: one.__qualname__,
)
FIELDS = [
    pytest.param(model, name, id=f"{model.__qualname__}.{name}")
    for model in MODELS
    for name in model.model_fields
    if facts_of(model, name).location
]


@pytest.mark.parametrize(("model", "name"), FIELDS)
def test_every_path_that_a_recipe_can_state_becomes_absolute(model: type[Spec], name: str) -> None:
    info = model.model_fields[name]
    shapes = {"list": (["here"], ["/base/here"]), "dict": ({"hf:./here": 1}, {"hf:/base/here": 1})}
    kind = next((kind for kind in shapes if str(info.annotation).startswith(kind)), "")
    stated, expected = shapes.get(kind, ("here", "/base/here"))
    at = info.alias or name
    paths = [(at,), (at, 0), (at, "hf:./here")]
    document = Document("f.yaml", {at: stated}, {path: Origin("f.yaml:1", "", "/base") for path in paths})
    found = located(model.model_construct(**{**dict.fromkeys(model.model_fields), name: stated}), document)
    assert getattr(found, name) == expected
    if kind != "dict":
        assert document.data == {at: expected}


def test_every_execution_field_with_a_text_is_a_path_or_is_known_as_none() -> None:
    def has_text(annotation: Any) -> bool:
        return annotation is str or any(map(has_text, get_args(annotation)))

    def stated_by(model: type[BaseModel], name: str) -> str:
        return next(one.__name__ for one in reversed(model.__mro__) if name in inspect.get_annotations(one))

    found = {
        f"{stated_by(model, name)}.{name}"
        for model in MODELS
        if not model.__module__.endswith("profiles")
        for name, info in model.model_fields.items()
        if (facts := facts_of(model, name)).role == "execution" and not facts.location
        if has_text(info.annotation)
    }
    assert found == NO_PATHS
