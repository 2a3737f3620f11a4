"""Chooses the stages of a run: all, those up to one (`--until`), or one alone (`--only`)."""

import os

from flows.planning.plan import Plan
from specs.dependencies import needs, servers
from specs.errors import Problem, SpecError, did_you_mean
from specs.locations import RULE
from specs.profiles import Profile
from specs.server import Server


def select(
    plan: Plan,
    until: str | None,
    only: str | None,
    option: str = "--until",
    profile: Profile | None = None,
) -> set[str]:
    """The names of the chosen stages. `option` is the name of the option for `until`; `profile` says where
    the stages are to run. SpecError for a missing stage, for `--only` with unfinished inputs, for stages that
    read unavailable inputs, and, with a `profile`, for stages that need a server's key that is not set in the
    environment."""
    if until is not None and only is not None:
        message = f"--until {until} also runs the inputs of '{until}', --only {only} runs no other stage"
        raise SpecError.of((), message, "give one of the two.", "--only")
    chosen = _chosen(plan, until, only, option)
    _refuse_unavailable(plan, chosen)
    if profile is not None:
        _refuse_unset_keys(plan, chosen, profile)
    return chosen


def _chosen(plan: Plan, until: str | None, only: str | None, until_option: str) -> set[str]:
    stages = plan.pipeline.stages
    for option, name in ((until_option, until), ("--only", only)):
        if name is not None and name not in stages:
            raise SpecError.of((), f"there is no stage '{name}'", did_you_mean(name, stages), option)
    if only is not None:
        parents = {parent for node in plan.graph.of(only) for parent in plan.graph.parents(node)}
        others = [name for name in sorted(parents) if plan.graph.nodes[name].stage != only]
        if missing := [name for name in others if plan.steps[name].action != "reuse"]:
            verb = "is" if len(missing) == 1 else "are"
            message = f"'{only}' reads {', '.join(missing)}, which {verb} not finished"
            raise SpecError.of((), message, f"run --until {only}.", "--only")
        return {only}
    if until is None:
        return set(stages)
    chosen: set[str] = set()
    queue = [until]
    while queue:
        name = queue.pop()
        if name not in chosen:
            chosen.add(name)
            queue += needs(name, stages[name])
            queue += [
                plan.graph.nodes[parent].stage
                for node in plan.graph.of(name)
                for parent in plan.graph.parents(node)
            ]
    return chosen


def _refuse_unavailable(plan: Plan, stages: set[str]) -> None:
    """Raises a SpecError that names each source and its url when unfinished parts of these stages read
    unavailable inputs."""
    wanted: dict[str, list[str]] = {}
    for step in plan.steps.values():
        if step.node.stage in stages and step.action != "reuse":
            for name in step.unavailable:
                wanted.setdefault(name, []).append(step.node.stage)
    problems = []
    for name, readers in wanted.items():
        unavailable = plan.graph.unavailable[name]
        first, *others = dict.fromkeys(readers)
        affected = f"'{first}' and the stages after it" if others else f"'{first}'"
        message = f"'{name}' is unavailable ({unavailable.reason}); {affected} cannot run"
        rule = f"; {RULE}" if os.path.isabs(unavailable.url) else ""
        fix = unavailable.install or f"put the data at {unavailable.url}, or correct the url{rule}."
        problems.append(Problem(unavailable.path, message, fix))
    if problems:
        raise plan.pipeline.located(SpecError(problems))


def _refuse_unset_keys(plan: Plan, stages: set[str], profile: Profile) -> None:
    """Raises a SpecError that names each variable when unfinished parts of these stages ask a server whose
    key is not set. Nodes of a Ray cluster have keys of their own."""
    asked: dict[str, list[Server]] = {}  # by stage
    for step in plan.steps.values():
        node = step.node
        on_ray = profile.launcher == "ray" and profile.stages == "all"
        on_ray |= profile.launch_of(node.launch).executor == "ray"
        if node.stage in stages and step.action != "reuse" and not on_ray:
            asked.setdefault(node.stage, []).extend(server for _, server in servers((), node.part))
    problems = []
    for name, of_stage in asked.items():
        for path, server in servers(("stages", name), plan.pipeline.stages[name]):
            if server.unset_key and server in of_stage:
                message = f"'{name}' asks a server whose key is in {server.key}, which is not set here"
                problems.append(Problem((*path, "key"), message, "set this environment variable."))
    if problems:
        raise plan.pipeline.located(SpecError(problems))
