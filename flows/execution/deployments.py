"""A deployment of a recipe on a Prefect server: who runs it, with which parameters, and when.

The flow is a module of the installed package: workers need that and the recipe's file, and no checkout.
"""

from typing import Any

from prefect.client.orchestration import get_client
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.types.entrypoint import EntrypointType

from flows.execution.flow import pipeline
from specs.errors import SpecError


def deploy(
    name: str, pool: str, parameters: dict[str, Any], schedule: str | None, tags: list[str], description: str
) -> str:
    """Registers a deployment of the flow, or replaces the one of that name; returns its full name.

    Args:
        parameters: of the flow; `spec` is the absolute path of the recipe on the worker's machine.
        schedule: five fields of cron, in UTC; None: runs are started by hand.

    Raises:
        SpecError: the server has no such work pool, or `schedule` is no schedule.
    """
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(pool)
        except ObjectNotFound:
            fix = f"prefect work-pool create {pool} --type process, or name another with --pool."
            raise SpecError.of((), f"the server has no work pool '{pool}'", fix, "--pool") from None
    try:
        deployment = RunnerDeployment.from_flow(
            pipeline,
            name,
            cron=schedule,
            parameters=parameters,
            description=description,
            tags=tags,
            work_pool_name=pool,
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
    except ValueError as error:
        fix = "write the five fields of cron: minute, hour, day of month, month, day of week."
        raise SpecError.of((), f"'{schedule}' is no schedule: {_last(error)}", fix, "--cron") from None
    deployment.apply()
    return f"{pipeline.name}/{name}"


def _last(error: ValueError) -> str:
    """What a validation error says about its field."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("Value error")), lines[-1])
