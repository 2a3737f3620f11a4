"""The reference of the site has every model of a recipe, and every field of it as the model has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from specs.base import Spec, execution, identity, reference
from specs.capabilities import OPTIMIZERS
from specs.stages import STAGES
from specs.stages.base import Stage
from tools.reference import models, optimizers, table

PAGES = Path(__file__).parents[2] / "docs" / "reference"


class Inner(Spec):
    size: int = identity(3)


class Outer(Spec):
    inner: Inner = identity(default_factory=Inner)
    from_: str | None = reference(None, alias="from", description="`stage@<ref>`: a <stage> | none, see a_b")
    mode: Literal["a", "b"] = execution("a")
    maps: dict[str, list[Inner]] = identity()


def test_a_table_has_type_default_role_and_description_of_every_field() -> None:
    inner = f"[Inner][{__name__}.Inner]"
    assert table(Outer).splitlines()[2:] == [
        f"| `inner` | {inner} |  | identity |  |",
        r"| `from` | text \| null | `null` | reference | `stage@<ref>`: a \<stage> \| none, see a\_b |",
        r'| `mode` | `a` \| `b` | `"a"` | execution |  |',
        f"| `maps` | map of text to list of {inner} | required | identity |  |",
    ]


def test_the_models_of_a_spec_are_found_at_any_depth() -> None:
    assert models(Outer) == {Outer, Inner}
    assert set(STAGES.values()) < models()


def test_a_stage_is_shown_without_the_fields_that_every_stage_has() -> None:
    assert "`silence`" in table(Stage)
    assert all("`silence`" not in table(stage) for stage in STAGES.values())


def test_every_model_of_a_recipe_is_on_one_page() -> None:
    shown = [
        path
        for page in PAGES.glob("*.md")
        for path in re.findall(r"^::: (specs\.\S+)", page.read_text(), re.M)
    ]
    paths = {f"{model.__module__}.{model.__name__}" for model in models()}
    assert paths - set(shown) == set()
    assert sorted(set(shown)) == sorted(shown)


def test_every_optimizer_has_a_row_with_what_it_reads() -> None:
    rows = [re.findall(r"`([\w-]+)`", line.rpartition("|")[0]) for line in optimizers().splitlines()[2:]]
    assert rows == [[name, *published.defaults] for name, published in OPTIMIZERS.items()]
