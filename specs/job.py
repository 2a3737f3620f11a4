"""The job that the launcher hands to the process of a stage: one JSON file, complete, without secrets."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from specs.launch import Launch

REPORT = "@apertus "
"""Prefix of output lines that are reports to the launcher; `Job.progress` where the two share no folder."""


class InputRef(BaseModel):
    """An input of a stage: an artifact in the store, or (kind `external`) documents outside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    fingerprint: str
    name: str = ""
    path: str | None = None  # artifact folder in the store
    step: int | None = None  # of a checkpoint
    checkpoint: str | None = None  # folder of that checkpoint in the store


class Job(BaseModel):
    """One attempt at one part."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline: str = ""  # name of the recipe; for people
    node: str  # "pretrain/2"; for people
    kind: str
    version: int
    fingerprint: str
    spec: dict[str, Any]  # the resolved part, for the Part model of its kind
    identity: dict[str, Any]  # the hashed fields, for the manifest and for comparisons
    inputs: dict[str, InputRef]
    launch: dict[str, Any]
    store: str
    path: str  # artifact folder in the store
    attempt: str
    lease: int | None = None  # generation of the lease that the attempt holds; None for a run without leases
    scratch: str  # local folder of this attempt
    progress: str  # local JSONL file the stage appends its progress to
    resume_step: int | None = None  # training: step of the checkpoint of this very trajectory to resume from
    profile: dict[str, Any] = {}  # `specs.profile.Profile`
    tracking: dict[str, Any] = {}  # `specs.tracking.Tracking`, with absolute folders
    launched_at: float = 0.0  # unix time, for the start-up part of the timings

    @property
    def gpus(self) -> int:
        """GPUs of one node for a part that is one process and uses a whole model: `launch.parallel.tp` where
        completions are sampled or tasks are run, one for a reward model; 0 for work on CPUs. Processes of
        torchrun have one each instead."""
        if self.kind == "rewards":
            return int(self.spec["reward"]["model"] is not None)
        return Launch.model_validate(self.launch).tensor_parallel if self.kind in ("completions", "harness") else 0
