"""An attempt at a stage as a Slurm job: sbatch, and in it one torchrun per node.

The job and its launcher share the attempt's scratch folder, which all nodes see at the same path: `job.json`,
`job.sh` and `node.sh`; `log.txt` and `progress.jsonl`, which are followed; `alive`, which changes while the
launcher lives; `stop`, which asks the stage to commit and end; `deadline`, which says that the time limit is
the reason; `code`, the exit code. Nothing in the folder is needed after the attempt.

Slurm never starts a job again by itself (`--no-requeue`): the next one has to resume from another checkpoint.
The launcher's caller submits it, when `Ended.requeue` says that the cluster, and not the stage, ended this
one.

Invariant: no job outlives its launcher for long: it is cancelled when `run` is left; when the launcher was
killed, the stage notices that `alive` does not change any more, commits, and ends.
"""

import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from infra import slurm
from infra.launchers.cluster import ClusterJob
from infra.launchers.local import (
    HUNG,
    TAIL_LINES,
    Ended,
    error_of,
    follow,
    lines_of,
    stacks_of,
    stage_environment,
)
from infra.liveness import beats_in_file
from specs.job import Job, ProgressRow
from specs.launch import Launch
from specs.profiles import Profile
from specs.redaction import redacted

JOB = """\
#!/bin/bash
# The job of one attempt. Some time before the limit, Slurm sends a signal, at which the stage commits
# and ends; the job waits for that.
trap 'touch {scratch}/deadline {scratch}/stop' USR1
{setup}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {srun} bash {scratch}/node.sh "$head" &
wait $!; code=$?
while kill -0 $! 2> /dev/null; do wait $!; code=$?; done
echo "$code" > {scratch}/code.part && mv {scratch}/code.part {scratch}/code
exit "$code"
"""

NODE = """\
#!/bin/bash
# On every node of the job; the first argument is the name of the first node.
{environment}
cd {folder} || exit 1
exec {program}
"""


class SlurmJob(ClusterJob):
    """An attempt that runs as a Slurm job. `exclude`: nodes that the job must not get."""

    def __init__(
        self, job: Job, launch: Launch, profile: Profile, *, distributed: bool, exclude: Sequence[str] = ()
    ) -> None:
        announced = profile.slurm.stop_before_end if profile.slurm.time_limit is not None else None
        super().__init__(job, launch, profile, distributed=distributed, announced=announced)
        self.exclude = list(exclude)
        self._jobs = slurm.Jobs()

    def script(self) -> str:
        settings = self.profile.slurm
        options: slurm.Options = {
            "nodes": self.nodes,
            "ntasks": self.nodes,
            # since Slurm 22.05 srun does not take it over from sbatch
            "cpus-per-task": settings.cpus_per_task,
            "kill-on-bad-exit": 1,
            **settings.srun_arguments,
        }
        return JOB.format(
            scratch=shlex.quote(str(self.scratch)),
            setup="\n".join(slurm.setup_lines(self.profile)),
            srun=" ".join(map(shlex.quote, slurm.flags(options))),
        )

    def node_script(self) -> str:
        """The script that runs on each node."""
        program = slurm.python(self.profile)
        if self.distributed:
            port = "$((20000 + SLURM_JOB_ID % 20000))"
            program = " ".join([program, *self.torchrun('"$SLURM_NODEID"', '"$1"', port)])
        program += f" -m apertus_model.stages {shlex.quote(str(self.scratch / 'job.json'))}"
        variables = {
            **stage_environment(self.launch, self.stop_seconds),
            "APERTUS_STOP_FILE": str(self.scratch / "stop"),
            "APERTUS_ALIVE_FILE": str(self.scratch / "alive"),
        }
        environment = "\n".join(slurm.exports(self.profile, variables))
        return NODE.format(environment=environment, folder=slurm.checkout(self.profile), program=program)

    def options(self) -> slurm.Options:
        settings, name = self.profile.slurm, f"apertus-{self.job.pipeline}-{self.job.node}"
        resources = (settings.cpus_per_task, settings.memory, settings.time_limit)
        before_end = f"B:USR1@{int(settings.stop_before_end.seconds)}"
        return {
            **slurm.options(settings, name, self.scratch / "log.txt", *resources),
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "signal": None if settings.time_limit is None else before_end,
            "exclude": ",".join(self.exclude) or None,
            "chdir": str(self.scratch),
            "no-requeue": True,
        }

    def run(
        self,
        on_line: Callable[[str], None],
        on_progress: Callable[[ProgressRow], None],
        on_start: Callable[[int], None] = lambda pipe: None,
    ) -> Ended:
        """Submits the job and blocks until it is over. SlurmError when sbatch refuses it."""
        (self.scratch / "job.json").write_text(self.job.model_dump_json(indent=1))
        (self.scratch / "job.sh").write_text(self.script())
        (self.scratch / "node.sh").write_text(self.node_script())
        Path(self.job.progress).touch()
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        over = threading.Event()

        def read() -> None:
            for line in lines_of(self.scratch / "log.txt", over, slurm.POLL_SECONDS / 5):
                tail.append(line := redacted(line))
                on_line(line)

        helpers = [
            threading.Thread(target=read, daemon=True),
            threading.Thread(target=follow, args=(Path(self.job.progress), on_progress, over), daemon=True),
        ]
        if self._stopped:
            return Ended(-15, self._stopped, (), None)
        for helper in helpers:
            helper.start()
        try:
            number = self._submit(on_line)
            on_line(f"submitted as Slurm job {number}: {self.nodes} nodes, {self.per_node} processes on each")
            with beats_in_file(self.scratch / "alive"):
                state = self._wait(number)
            if stacks := stacks_of(self.scratch):
                with open(self.scratch / "log.txt", "a", encoding="utf-8") as log:  # this file is followed
                    log.write("\n".join([*stacks, ""]))
                self._stopped = self._stopped or HUNG
        finally:
            self._jobs.cancel()
            over.set()
            for helper in helpers:
                helper.join()
            self._redact()
        return self._ended(number, state, tuple(tail))

    def _redact(self) -> None:
        """Removes secrets from what Slurm itself wrote, before the log is stored."""
        log, clean = self.scratch / "log.txt", self.scratch / "log.redacted.txt"
        log.touch()
        with open(log, encoding="utf-8", errors="replace") as raw, open(clean, "w", encoding="utf-8") as file:
            file.writelines(map(redacted, raw))
        os.replace(clean, log)

    def _submit(self, on_line: Callable[[str], None]) -> str:
        """Submits the job; if sbatch refuses it, with the nodes that failed before. Returns its number."""
        script = self.scratch / "job.sh"
        try:
            return self._jobs.submit(script, self.options())
        except slurm.SlurmError as error:
            if not self.exclude:
                raise
            on_line(f"without {', '.join(self.exclude)}: {error}; trying with them")
            return self._jobs.submit(script, {**self.options(), "exclude": None})

    def _tell(self, reason: str) -> None:
        (self.scratch / "stop").write_text(reason)

    def _wait(self, number: str) -> str:
        """Blocks until the job has ended and returns its last state. A job that was told to stop is cancelled
        if it has not begun, or takes too long, or Slurm does not answer by then. A step may have failed with
        its node, which Slurm says a little later: the last state of the job is waited for."""
        while True:
            states, code = self._jobs.states(), self._code()
            state = None if states is None else states.get(number, "gone")
            ended = state in slurm.ENDED
            if code == 0 and not ended:
                return "COMPLETED"
            given_up = state is None and self._overdue
            over = True if code is not None or given_up else None if state is None else ended
            for_long = self._jobs.over_for_long(number, over)
            if over:
                known = ended if code is not None else state in slurm.ENDED_BY_CLUSTER
                if known or self._stopped or for_long:
                    return state or "no answer"
            else:
                if self._stopped and (state == "PENDING" or self._overdue):
                    self._jobs.cancel()
                if state in ("PENDING", "RUNNING"):
                    self._keep_to_limit(waits=state == "PENDING")
            time.sleep(slurm.POLL_SECONDS)

    def _code(self) -> int | None:
        """The exit code that the job left; None if it left none, 1 if it is not a number."""
        try:
            return int((self.scratch / "code").read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            return 1

    def _ended(self, number: str, state: str, tail: tuple[str, ...]) -> Ended:
        code, error = self._code(), error_of(self.scratch)
        with open(self.scratch / "log.txt", "a+", encoding="utf-8", errors="replace") as log:
            log.seek(0)
            dead = slurm.failed_nodes(log)  # srun may return 0 all the same
        why = slurm.ENDED_BY_CLUSTER.get(state, "")
        if not why and dead:
            why = slurm.ENDED_BY_CLUSTER["NODE_FAIL"]
        if not why and (self.scratch / "deadline").exists():
            why = "its time limit was near"
        # stopped by the clock: `launch.stop_before_end`
        if not why and error is not None and error.interrupted:
            why = error.message
        if dead or state in ("NODE_FAIL", "BOOT_FAIL"):
            dead |= slurm.unused_nodes(number)
        return Ended(
            1 if code is None else code,
            self._stopped,
            (*tail, *([f"Slurm job {number}: {state}"] if code is None else [])),
            error,
            f"Slurm job {number}: {why}" if why and not self._stopped else "",
            tuple(sorted(dead)),
        )
