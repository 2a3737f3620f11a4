"""Facts about a cluster, in a separate file, so that recipes run anywhere unchanged.

`apertus run SPEC --profile FILE`, or `APERTUS_PROFILE`, names the file. Without one, stages are processes of
this machine. Nothing in a profile enters a fingerprint.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, StringConstraints, ValidationError, field_validator, model_validator

from specs.base import Spec, execution, location
from specs.document import read
from specs.errors import SpecError
from specs.explain import explain
from specs.launch import Executor, Launch, Workers, not_kubernetes
from specs.locations import located
from specs.redaction import is_secret
from specs.units import Duration

OUR_SBATCH_OPTIONS = {
    "array", "chdir", "cpus-per-task", "error", "exclude", "export", "job-name", "mem", "nodes", "no-requeue",
    "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "partition", "requeue", "signal", "time",
    "wait", "wrap",
}  # fmt: skip
Quantity = Annotated[str, StringConstraints(pattern=r"^[1-9]\d*(\.\d+)?([KMGT]i?)?$")]


class SlurmProfile(Spec):
    """Settings of the jobs submitted to Slurm. Fields that are left out use the cluster's defaults."""

    partition: str | None = execution(None)
    time_limit: Duration | None = execution(
        None,
        description="time limit of one job, rounded up to minutes; a longer stage resumes from its last"
        " checkpoint in the next job",
    )
    stop_before_end: Duration = execution(
        Duration(300.0),
        description="how long before the time limit the stage is told to commit a checkpoint and end (Slurm"
        " may be a minute early); also the time that a stage has whenever it is told to stop",
    )
    cpus_per_task: int | None = execution(
        None, ge=1, description="CPUs of the one task of a node, which has all its GPUs"
    )
    memory: Quantity | None = execution(None, description="memory of a node")
    arguments: dict[str, str | int | bool] = execution(
        default_factory=dict,
        description="further options of `sbatch`: `{account: a123, reservation: team, gpus-per-node: 4}`",
    )
    srun_arguments: dict[str, str | int | bool] = execution(
        default_factory=dict,
        description="options of `srun`: `{container-image: /images/apertus.sqsh, container-mounts:"
        " /scratch}`, `{mpi: pmix}`",
    )

    def conflicts(self) -> Iterator[str]:
        if self.time_limit is not None and self.stop_before_end.seconds >= self.time_limit.seconds:
            yield (
                f"stop_before_end is {self.stop_before_end} and time_limit {self.time_limit}: a stage would "
                "be told to stop as it begins. Fix: set a shorter stop_before_end, or a longer time_limit"
            )

    @field_validator("arguments", "srun_arguments")
    @classmethod
    def _not_ours(cls, arguments: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for name in arguments:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise ValueError(f"'{name}' is not a long option of Slurm; write 'account' for '--account'")
            if name in OUR_SBATCH_OPTIONS:
                raise ValueError(f"'{name}' is set by the launcher, or has a field of its own; leave it out")
        return arguments


class RayProfile(Spec):
    """A Ray cluster that runs already. Its nodes have this project, and credentials of the store."""

    address: str | None = execution(
        None,
        pattern=r"^(ray://)?[^/\s:]+:\d+$",
        description=(
            "its head: `HOST:6379` for a process on one of its nodes, `ray://HOST:10001` for one anywhere"
            " else; that of RAY_ADDRESS by default"
        ),
    )
    gpus: bool = execution(
        True, description="whether its nodes have GPUs; false: models are held in memory of the CPU"
    )
    grows: bool = execution(
        False,
        description="whether an autoscaler adds nodes; false: a plan says which stages its nodes have no room"
        " for",
    )
    cpus_per_node: int | None = execution(
        None,
        ge=1,
        description="CPUs that training takes of each of its nodes; launch.threads per process by default",
    )
    most_workers: int = execution(
        1000,
        ge=1,
        le=100_000,
        description=(
            "workers of a stage that states no launch.workers.count and has as many units; those that wait"
            " for a place show an autoscaler how many nodes are wanted"
        ),
    )


class Profile(Spec):
    """The settings of where stages run."""

    launcher: Annotated[Literal["local", "slurm", "ray"], BeforeValidator(not_kubernetes)] = execution(
        "local"
    )
    stages: Literal["training", "all"] = execution(
        "training",
        description="stages that run on the cluster. training: those that use GPUs (training engine,"
        " sampling, reward models, tasks of the harness); the others run where the launcher does",
    )
    gpus_per_node: int = execution(1, ge=1, description="processes of a node")
    scratch: str | None = location(
        None, description="folder for attempts; for Slurm one that all nodes see at the same path"
    )
    python: str | None = execution(
        None, description="the interpreter on the nodes, or in the container; this one by default"
    )
    checkout: str | None = execution(
        None, description="the checkout on the nodes, or in the container; this one by default"
    )
    modules: list[str] = execution(default_factory=list, description="environment modules that a job loads")
    setup: list[str] = execution(default_factory=list, description="shell lines that a job runs first")
    environment: dict[str, str] = execution(
        default_factory=dict, description="variables of the stage's processes; no secrets"
    )
    executor: Executor | None = execution(
        None, description="where the workers of a stage run whose recipe states no launch.executor"
    )
    workers: Workers | None = execution(
        None, description="workers of a stage whose recipe states no launch.workers"
    )
    slurm: SlurmProfile = execution(default_factory=SlurmProfile)
    ray: RayProfile = execution(default_factory=RayProfile)

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if is_secret(name):
                raise ValueError(
                    f"'{name}' looks like a secret; a profile is a file to share: set it in the environment,"
                    " or in a Secret"
                )
        return environment

    @model_validator(mode="before")
    @classmethod
    def _not_kubernetes(cls, profile: Any) -> Any:
        if isinstance(profile, dict) and "kubernetes" in profile:
            raise ValueError("kubernetes: is gone; write ray: {address: ...} (infra/profiles/ray.yaml)")
        return profile

    def conflicts(self) -> Iterator[str]:
        if self.launcher == "ray" and (self.modules or self.setup):
            yield "modules and setup are for Slurm; the nodes of a Ray cluster are prepared before"

    def launch_of(self, launch: Launch) -> Launch:
        """The launch settings of a part, with the profile's executor and workers where `launch` has none."""
        return launch.over(Launch(executor=self.executor, workers=self.workers))


def load_profile(path: str | Path | None) -> Profile:
    """Reads a profile; without a path, that of a single machine. Raises SpecError with every problem
    found."""
    if not path:
        return Profile()
    document = read(path, "a profile is a mapping with launcher, scratch, slurm and the like")
    try:
        return located(Profile.model_validate(document.data), document)
    except ValidationError as error:
        raise SpecError(explain(Profile, document, error)) from None
