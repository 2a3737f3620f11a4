"""Checks, before anything starts, that a run can use the Ray cluster of its profile."""

from collections.abc import Collection

from flows.planning.plan import Plan
from infra.launchers import needs_of_ray
from infra.ray_cluster import ClusterNeeds, address_of, connection, nodes_in_words, wants_token
from specs.profiles import Profile


def cluster_notes(plan: Plan, profile: Profile, chosen: Collection[str]) -> list[str]:
    """What is to be known of the Ray cluster before the unfinished parts of the chosen stages use it: nothing
    if none of them does. StageError if this process cannot connect to it, with the fix; or if the processes
    of a stage cannot be divided among nodes."""
    wanted: dict[ClusterNeeds, list[str]] = {}
    for step in plan.pending:
        part = step.node.part
        if step.node.stage in chosen:
            launch = profile.launch_of(step.node.launch)
            gpus, in_units = part.gpus_of_worker(step.node.launch), part.WORKERS > 0
            needs = needs_of_ray(launch, profile, gpus, distributed=part.ON_ENGINE, in_units=in_units)
            if needs is not None:
                wanted.setdefault(needs, []).append(step.node.name)
    if not wanted:
        return []
    notes = []
    with connection(profile.ray) as ray:
        if not wants_token(address_of(profile.ray)):
            notes.append(
                "the Ray cluster has no token: whoever reaches its ports can run code. Fix: start it with"
                " RAY_AUTH_MODE=token (docs/operations.md)"
            )
        if not profile.ray.grows:
            notes += [
                f"{', '.join(names)}: the Ray cluster has no room for {needs}; {nodes_in_words(ray)}"
                for needs, names in wanted.items()
                if not needs.fit(ray)
            ]
    return notes
