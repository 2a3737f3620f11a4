"""Builds the graph of the parts of a checked recipe.

`build` walks the stages, inputs first; each module of this folder resolves one family of kinds.

Invariant: a pure function of recipe, listing of the sources, small files of the Hugging Face models, and, for
`@best:` references and selections alone, of the store.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from flows.planning.graph import Graph
from flows.planning.parts.builder import Builder
from flows.planning.parts.hugging_face import check_other_models, open_models
from flows.planning.parts.training import best_steps
from infra.store import Store
from infra.store.inputs import Listing
from specs.dependencies import order
from specs.errors import SpecError
from specs.pipeline import Pipeline
from specs.resolution import resolve
from specs.stages import STAGES, TRAINING
from specs.trajectory import imported


def _found() -> dict[str, Callable[[Builder, str, Any], None]]:
    """For each kind of stage, the function `add_<kind>` of a module of this folder; `add_training` for
    kinds that train."""
    modules = [
        importlib.import_module(module.name) for module in pkgutil.iter_modules(__path__, f"{__name__}.")
    ]
    functions = {name: value for module in modules for name, value in vars(module).items()}
    return {kind: functions["add_training" if kind in TRAINING else f"add_{kind}"] for kind in STAGES}


ADD = _found()


def build(
    pipeline: Pipeline,
    store: Store,
    on_read: Callable[[str, Listing], None] = lambda name, listing: None,
    ask_network: bool = True,
) -> Graph:
    """Resolves a checked pipeline. `on_read` is called for each source that must be read for its digest;
    without `ask_network`, declared remote inputs count as unavailable. SpecError with every problem."""
    best: dict[str, int] = {}
    while True:
        graph = _build(pipeline, store, on_read, best, ask_network)
        known = best_steps(graph, pipeline, store)
        if known == best:
            return graph
        best = known  # stages that start from a best checkpoint now have another parent


def _build(
    pipeline: Pipeline,
    store: Store,
    on_read: Callable[[str, Listing], None],
    best: dict[str, int],
    ask_network: bool,
) -> Graph:
    names = order(pipeline)
    builder = Builder(pipeline, store, on_read, ask_network)
    builder.graph.best = best
    builder.graph.models = open_models(builder)
    check_other_models(builder)
    if builder.problems:
        raise SpecError(builder.problems)
    models = {
        name: imported(name, model.model, context=model.context, chat=model.chat)
        for name, model in builder.graph.models.items()
        if model.model is not None
    }
    builder.graph.trajectories = resolve(pipeline, names, best, models)
    for name in names:
        stage = pipeline.stages[name]
        ADD[stage.kind](builder, name, stage)
        builder.graph.after[name] = tuple(stage.after)
    if builder.problems:
        raise SpecError(builder.problems)
    return builder.graph
