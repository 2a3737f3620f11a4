"""The recipes of Apertus made small by overrides, and what the ablation compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.planning.plan import make
from infra.store import Store
from specs.recipe import load
from tests.flows.planning.test_published_recipes import LADDER, LENGTHS, RECIPES

# The same stages, small enough for a laptop: what a user would try before asking for a cluster.
MINIATURES = {
    "apertus-8b": [
        "variables.flavour=mini",
        "variables.batches={0 samples: 8, 4_000 samples: 16}",
        "variables.sft_steps=20",
    ],
    "apertus-70b": [
        "variables.flavour=mini",
        "variables.batches={0 samples: 8, 4_000 samples: 16}",
        "variables.sft_steps=20",
    ],
    "apertus-1.5b-100b": [
        *(
            "stages.pretrain.model={flavour: mini}",
            "stages.tokenizer.vocab_size=2048",
            "stages.pretrain.global_batch_size=8",
            "stages.pretrain.budget=60 steps",
        ),
        *("variables.warmup=5", "variables.decay=12", "launch.processes=1"),
    ],
    "continue-pretrain": [
        "variables.steps=40",
        "variables.warmup=4",
        "variables.sft_steps=100",
        "stages.continue.global_batch_size=16",
    ],
}
SMALL = [
    "variables.data_stages={0 steps: stage-1, 600 steps: stage-3, 800 steps: stage-4, 1000 steps: stage-5}"
]


def miniature(name: str) -> list[str]:
    """Overrides that make a recipe small."""
    chosen = list(MINIATURES[name])
    if name in ("apertus-8b", "apertus-70b"):
        stages = load(RECIPES / f"{name}.yaml").stages
        chosen += [*SMALL, "launch={processes: 1}", "stages.tokenizer.vocab_size=2048"]
        chosen += [
            f"stages.{stage}.launch={{processes: 1}}" for stage in stages if stages[stage].launch.processes
        ]
        chosen += [f"variables.long_steps_{length}=4" for length in LENGTHS] + [
            f"variables.long_batch_{length}=2" for length in LENGTHS
        ]
        chosen += ["stages.pretrain.budget=16_000 samples", "stages.pretrain.schedule.warmup=400 samples"]
        chosen += ["variables.decay_over=4_000 samples", "variables.long_warmup=1", "variables.sft_warmup=2"]
    return chosen


@pytest.mark.parametrize("name", LADDER)
def test_a_miniature_of_each_recipe_is_a_few_overrides_away(name: str, tmp_path: Path) -> None:
    whole, small = (
        make(load(RECIPES / f"{name}.yaml", overrides), Store.open(str(tmp_path)), ask_network=False)
        for overrides in ([], miniature(name))
    )
    assert small.pipeline.stages.keys() == whole.pipeline.stages.keys()
    assert small.graph.nodes.keys() >= {
        node.name for node in whole.graph.nodes.values() if node.stage == node.name
    }
    tokens = [plan.to_json()["totals"]["tokens"] for plan in (whole, small)]
    assert tokens[1] * 10 < tokens[0]


def test_the_baseline_of_the_ablation_has_as_many_parameters_as_its_variant() -> None:
    plan = make(load(RECIPES / "apertus-1.5b-100b.yaml"), Store.open("nowhere"), ask_network=False)
    models = {name: plan.graph.trajectories[f"pretrain-{name}"].model for name in ("baseline", "xielu")}
    assert (models["baseline"].ffn_dim, models["xielu"].ffn_dim) == (8192, 12_288)
    assert models["xielu"].parameters - models["baseline"].parameters == 2 * 16  # xIELU's two scalars a layer


def test_the_ablation_changes_one_thing_at_a_time() -> None:
    trajectories = make(
        load(RECIPES / "apertus-1.5b-100b.yaml"), Store.open("nowhere"), ask_network=False
    ).graph.trajectories
    choices = {
        name: (
            run.model.activation,
            run.model.qk_norm,
            run.settings.optimizer.name,
            run.segments[-1].schedule.decay,
            run.settings.goldfish is not None,
        )
        for name, run in trajectories.items()
    }
    assert choices == {
        "pretrain-baseline": ("swiglu", False, "adamw", "cosine", False),
        "pretrain-ademamix": ("swiglu", False, "ademamix", "cosine", False),
        "pretrain-xielu": ("xielu", False, "adamw", "cosine", False),
        "pretrain-qk-norm": ("swiglu", True, "adamw", "cosine", False),
        "pretrain-wsd": ("swiglu", False, "adamw", "1-sqrt", False),
        "pretrain-goldfish": ("swiglu", False, "adamw", "cosine", True),
        "pretrain-apertus": ("xielu", True, "ademamix", "1-sqrt", True),
    }
