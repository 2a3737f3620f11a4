"""The references of a stage to checkpoints, data and other results, the order of stages that follows, and the
servers that specs name."""

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

from specs.base import Spec, facts_of
from specs.errors import FieldPath, SpecError
from specs.pipeline import Pipeline
from specs.server import Server
from specs.stages import STAGES
from specs.stages.base import Stage
from specs.units import REST, Reference

CHECKPOINT = "checkpoint"  # the result of all kinds that make a language model
MODELS = (CHECKPOINT, "reward_model")  # results that have steps


class Use(NamedTuple):
    """One reference of a stage to another."""

    path: FieldPath  # of the field that holds it
    reference: Reference
    results: tuple[str, ...]  # results that the named stage may have

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of stages with these results."""
        return tuple(kind for kind, stage in STAGES.items() if stage.result() in self.results)


def uses(name: str, stage: Stage) -> list[Use]:
    """Every reference of a stage to another stage, checkpoints first."""
    named = [
        use
        for use in _references(("stages", name), stage)
        if not (use.reference.hugging_face and CHECKPOINT in use.results)
    ]
    return sorted(named, key=lambda use: CHECKPOINT not in use.results)


def checkpoints(name: str, stage: Stage) -> Iterator[tuple[FieldPath, Reference]]:
    """The checkpoints and Hugging Face models that a stage names, with the paths of their fields."""
    return (
        (use.path, use.reference) for use in _references(("stages", name), stage) if CHECKPOINT in use.results
    )


def _references(at: FieldPath, spec: Spec) -> Iterator[Use]:
    """The references of a spec, and of the specs in its fields."""
    for name, shown, results in _fields(type(spec)):
        value = getattr(spec, name)
        if not results and isinstance(value, (bool, int, float, str)):
            continue
        for path, item in _items((*at, shown), value):
            if results and item != REST:
                yield Use(path, _named(path, item), results)
            if isinstance(item, Spec):
                yield from _references(path, item)


def servers(at: FieldPath, spec: Spec) -> Iterator[tuple[FieldPath, Server]]:
    """The servers in the fields of a stage or a part, at any depth, with the paths of their fields; `at`: the
    path of the spec."""
    for name, shown, _ in _fields(type(spec)):
        for path, item in _items((*at, shown), getattr(spec, name)):
            if isinstance(item, Server):
                yield path, item
            elif isinstance(item, Spec):
                yield from servers(path, item)


@cache
def _fields(kind: type[Spec]) -> list[tuple[str, str, tuple[str, ...]]]:
    """The name of each field, its name in a recipe, and the results that it may name."""
    fields = kind.model_fields.items()
    return [(name, info.alias or name, facts_of(kind, name).results) for name, info in fields]


def _items(path: FieldPath, value: Any) -> Iterator[tuple[FieldPath, Any]]:
    """The items of a list or a mapping, or the field's value if it is set; each with its path."""
    if isinstance(value, (dict, list)):
        yield from (
            ((*path, key), item)
            for key, item in (value.items() if isinstance(value, dict) else enumerate(value))
        )
    elif value is not None:
        yield path, value


def _named(path: FieldPath, item: Any) -> Reference:
    """The reference that an item is; in a mapping whose keys are references, the last key of `path`."""
    return Reference.parse(item if isinstance(item, (Reference, str)) else path[-1])


def order(pipeline: Pipeline, wrong: Collection[str] = ()) -> list[str]:
    """The names of the stages, inputs first, otherwise in the order of the file. A mixture comes just before
    the first stage that needs it, and the mixtures of one stage come in the order in which they are trained
    on. `wrong`: stages whose inputs do not count. Raises SpecError, which names the stages, for a cycle."""
    done: list[str] = []
    path: list[str] = []
    stages = pipeline.stages

    def ancestors(name: str) -> set[str]:
        """The stage and all stages that it needs, directly or indirectly: an excluded stage does not come
        before a stage that it needs."""
        reached: set[str] = set()
        left = [name]
        while left:
            other = left.pop()
            if other in stages and other not in reached:
                reached.add(other)
                left += needs(other, stages[other])
        return reached

    def visit(name: str) -> None:
        if name in done:
            return
        if name in path:
            cycle = " -> ".join([*path[path.index(name) :], name])
            message = f"the stages form a cycle: {cycle}"
            raise SpecError.of(("stages", name), message, "let one of them start from another stage.")
        path.append(name)
        excluded = [
            other for mixture in mixtures_of(pipeline, name) for other in excluded_by(pipeline, mixture)
        ]
        for needed in [
            *needs(name, stages[name]),
            *(other for other in excluded if name not in ancestors(other)),
        ]:
            if needed in stages and name not in wrong:
                visit(needed)
        path.pop()
        done.append(name)

    for name in sorted(stages, key=lambda name: stages[name].kind == "mixture"):
        visit(name)
    return done


def needs(name: str, stage: Stage) -> list[str]:
    """The names of the stages that must be finished before this one. Parts of a stage may read each other
    (`not_in`); the planner orders those."""
    others = [
        use.reference.stage
        for use in uses(name, stage)
        if use.reference.stage != name or "not_in" not in use.path
    ]
    return list(dict.fromkeys(others + stage.after))


def mixtures_of(pipeline: Pipeline, name: str) -> list[str]:
    """The names of the mixtures that a training stage draws from."""
    stage = pipeline.stages[name]
    uses_of = uses(name, stage) if stage.IN_LAYOUT else []
    return [use.reference.stage for use in uses_of if use.results == ("mixture",)]


def excluded_by(pipeline: Pipeline, mixture: str) -> list[str]:
    """The names of the training stages that a mixture, or one of its mixtures, excludes."""
    excluded: dict[str, None] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        stage = pipeline.stages.get(name)
        if stage is not None and name not in seen:
            seen.add(name)
            excluded.update(dict.fromkeys(stage.excluded_stages))
            for use in uses(name, stage):
                if "mixture" in use.results:
                    visit(use.reference.stage)

    visit(mixture)
    return list(excluded)
