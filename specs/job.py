"""The job that the launcher hands to the process of a stage: one complete JSON file without secrets."""

from typing import Any

from pydantic import ConfigDict, Field

from specs.base import Strict
from specs.launch import Launch
from specs.profiles import Profile
from specs.tracking import Tracking

ERROR = "error.json"
"""The file of a stage's scratch folder that tells the launcher why there is no result: a `Failure`."""


class InputRef(Strict):
    """An input of a stage: an artifact in the store, or (kind `external`) documents outside it."""

    kind: str
    fingerprint: str
    name: str = ""  # for people
    path: str | None = None  # artifact folder in the store
    step: int | None = None  # of a checkpoint
    checkpoint: str | None = None  # folder of that checkpoint in the store


class Job(Strict):
    """One attempt at one part."""

    pipeline: str = ""  # name of the recipe; for people
    node: str  # "pretrain/2"; for people
    kind: str  # of the part
    version: int  # of the kind
    fingerprint: str  # of the part
    spec: dict[str, Any]  # the resolved part, for the Part model of its kind
    identity: dict[str, Any]  # the hashed fields, for the manifest and for comparisons
    inputs: dict[str, InputRef]  # by role
    launch: Launch
    store: str  # folder or URL
    path: str  # artifact folder in the store
    attempt: str  # name of the attempt
    lease: int | None = None  # generation of the lease that the attempt holds; None for a run without leases
    scratch: str  # local folder of this attempt
    progress: str  # local JSONL file to which the stage appends its progress
    resume_step: int | None = None  # training: step of this trajectory's checkpoint to resume from
    profile: Profile = Field(default_factory=Profile)
    tracking: Tracking = Field(default_factory=Tracking)
    gpus: int = 0  # of each worker; 0 if it holds no whole model
    launched_at: float = 0.0  # unix time, for the start-up part of the timings


class _Report(Strict):
    """A report of the process of a stage to its launcher, in a file."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class ProgressRow(_Report):
    """The progress of a stage."""

    done: float
    total: float
    unit: str  # of both
    metrics: dict[str, float] = Field(default_factory=dict)


class DamagedInput(_Report):
    """A checkpoint that a stage found damaged."""

    artifact: str  # its folder in the store
    step: int


class Failure(_Report):
    """The reason why a stage has no result."""

    message: str
    again: bool = False  # another attempt may succeed
    interrupted: bool = False  # the stage was told to stop, which is no error
    damaged: DamagedInput | None = None  # to be withdrawn, before another attempt
