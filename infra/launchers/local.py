"""Starts the process of a stage on this machine, follows it, and ends it. Also contains what the launchers of
clusters share with this one.

The stage's standard input is a pipe whose write end only the launcher holds: closing it, or dying, tells
every process of the stage to stop (`apertus_model.stop`). Its output is another pipe, which ends when the
last of its processes is gone.

Invariants: `run` returns only when no process of the stage is left. The launcher never judges success; the
store does.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from infra.launchers.warm import ForkedStage, ServerLost, server_for
from infra.liveness import STOP_SIGNALS, python_path
from specs.job import ERROR, Failure, Job, ProgressRow
from specs.launch import Launch
from specs.redaction import redacted
from specs.units import Duration

# the time that a stage has for its last checkpoint when it is told to stop; more when more is announced
STOP_SECONDS = 90.0
END_SECONDS = 30.0  # the time that its processes may take to end after that
TAIL_LINES = 30
STAGES = "apertus_model.stages"
TORCHRUN_ERROR = "torchrun.json"
TORCHRUN_SIGNALLED = r"SignalException: Process \d+ got signal: (\d+)"  # in the error file of torchelastic
RANK_SIGNALLED = re.compile(r"traceback : (Signal \d+ \(\w+\) received by PID \d+)")
HUNG = (
    "no step was made for longer than launch.hang_timeout; the log has the stacks of all threads of the ranks"
)
Started = subprocess.Popen[bytes] | ForkedStage


@dataclass(frozen=True)
class Ended:
    """The end of a process: exit code, why it was stopped (or ""), last lines, the error it left. `requeue`:
    why the cluster ended it, if the next job can resume; `dead_nodes`: not to be used again; `commits_for`:
    seconds for which the stage, which nobody follows any more, may still be committing."""

    code: int
    stopped: str
    tail: tuple[str, ...]
    error: Failure | None
    requeue: str = ""
    dead_nodes: tuple[str, ...] = ()
    commits_for: float = 0.0

    @property
    def last_words(self) -> str:
        """The signal that ended a rank, by torchrun's report; else the last line with a letter."""
        signals = [signalled[1] for line in self.tail if (signalled := RANK_SIGNALLED.search(line))]
        lines = [line for line in self.tail if re.search("[A-Za-z]", line)]
        return (signals or lines[-1:] or ["it printed nothing"])[0]


class LimitedAttempt:
    """An attempt, told once to stop, by its time limit at the latest. `distributed`: under torchrun."""

    def __init__(self, job: Job, launch: Launch, *, distributed: bool) -> None:
        self.job = job
        self.launch = launch
        self.distributed = distributed
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._stopped = ""
        self._stopped_at = 0.0

    def stop(self, reason: str) -> None:
        """Asks the stage to end, with a checkpoint if it trains, and kills it after the grace period."""
        with self._lock:
            if self._stopped:
                return
            self._stopped, self._stopped_at = reason, time.monotonic()
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Tells the stage to stop, in subclasses whose code that waits for the stage does not."""

    def _keep_to_limit(self, *, waits: bool = False) -> None:
        """Stops a stage that runs for longer than `launch.time_limit`. `waits`: it has not started yet."""
        now, limit = time.monotonic(), self.launch.time_limit
        if waits:
            self._begun = now
        if limit and now - self._begun > limit.seconds:
            self.stop(f"the time limit of {limit} was reached")


class Process(LimitedAttempt):
    """One attempt at a part, as processes of this machine."""

    _process: Started | None = None

    @property
    def grace(self) -> float:
        """Seconds until a stage that was told to stop is killed."""
        return stop_seconds(self.launch) + END_SECONDS

    def start(self, job_file: Path, say: Callable[[str], None]) -> Started | None:
        """Forks a stage of one process from a server that has imported torch, else starts Python; `say` gets
        the reason why it was not forked. None when the stage is told to stop meanwhile."""
        environment = self.environment()
        server = server_for(environment) if not self.distributed or self.launch.world_size == 1 else None
        if server is not None:
            program, wanted = f"{STAGES}.__main__", lambda: not self._stopped
            try:
                return server.start(program, [str(job_file)], environment, wanted)
            except ServerLost as error:
                if self._stopped:
                    return None
                say(f"{error}; this stage is a process of its own")
        return start_process(self.command(job_file), environment)

    def command(self, job_file: Path) -> list[str]:
        """The command that starts the stage as a new Python process."""
        module = ["-m", STAGES, str(job_file)]
        if not self.distributed:
            return [sys.executable, *module]
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            f"--nproc-per-node={self.launch.world_size}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            "--local-addr=127.0.0.1",
            "--max-restarts=0",
            *module,
        ]

    def environment(self) -> dict[str, str]:
        error_file = str(Path(self.job.scratch) / TORCHRUN_ERROR)
        own = {"TORCHELASTIC_ERROR_FILE": error_file, "PYTHONPATH": python_path()}
        return os.environ | stage_environment(self.launch, stop_seconds(self.launch)) | own

    def run(
        self,
        on_line: Callable[[str], None],
        on_progress: Callable[[ProgressRow], None],
        on_start: Callable[[int], None] = lambda pipe: None,
    ) -> Ended:
        """Starts the stage and blocks until it is over. `on_start` is told the inode of the pipe that is its
        standard input; helper threads call the other callbacks, one line or row at a time."""
        scratch = Path(self.job.scratch)
        job_file = scratch / "job.json"
        job_file.write_text(self.job.model_dump_json(indent=1))
        progress = Path(self.job.progress)
        progress.touch()

        def say(line: str) -> None:
            with open(scratch / "log.txt", "a", encoding="utf-8") as log:
                log.write(line + "\n")
            on_line(line)

        process = None if self._stopped else self.start(job_file, say)
        if process is None:
            return Ended(-signal.SIGTERM, self._stopped, (), None)
        assert process.stdin is not None
        on_start(os.fstat(process.stdin.fileno()).st_ino)
        with self._lock:
            self._process = process
        if self._stopped:
            self._end()
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        over = threading.Event()
        output = (process, scratch / "log.txt", tail, on_line)
        reader = threading.Thread(target=self._read, args=output, daemon=True)
        follower = threading.Thread(target=follow, args=(progress, on_progress, over), daemon=True)
        reader.start()
        follower.start()
        self._begun = time.monotonic()
        try:
            while process.poll() is None:
                self._keep_to_limit()
                time.sleep(0.05)
            self._close_stdin()  # the ranks may outlive a torchrun that was killed; they notice this
            reader.join(self.grace)
            if stacks := stacks_of(scratch):
                for line in stacks:
                    say(line)
                with self._lock:
                    self._stopped = self._stopped or HUNG
        finally:
            over.set()
            follower.join()
        code = process.returncode
        assert code is not None, "the loop above ended"
        return self._ended(code, tuple(tail))

    def _ended(self, code: int, tail: tuple[str, ...]) -> Ended:
        return Ended(code, self._stopped, tail, error_of(Path(self.job.scratch), code))

    def _tell(self, reason: str) -> None:
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            self._end()

    def _end(self) -> None:
        self._close_stdin()
        timer = threading.Timer(self.grace, self._kill)
        timer.daemon = True
        timer.start()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def _close_stdin(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    @staticmethod
    def _read(process: Started, log: Path, tail: deque[str], on_line: Callable[[str], None]) -> None:
        assert process.stdout is not None
        with open(log, "a", encoding="utf-8") as file:
            for raw in process.stdout:
                line = redacted(raw.decode("utf-8", "replace").rstrip("\n"))
                file.write(line + "\n")
                file.flush()
                tail.append(line)
                on_line(line)


def start_process(
    command: list[str], environment: Mapping[str, str], output: int | IO[bytes] = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, with pipes for its standard input and, by default, output."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**environment},
        start_new_session=True,
    )


def stop_seconds(launch: Launch, announced: Duration | None = None) -> float:
    """The seconds that a stage has to commit and end when told to stop: no fewer than the cluster
    (`announced`) or the stage (`launch.stop_before_end`) announces. Launchers wait for `END_SECONDS` more."""
    seconds = [span.seconds for span in (launch.stop_before_end, announced) if span is not None]
    return max([STOP_SECONDS, *seconds])


def stage_environment(launch: Launch, seconds: float) -> dict[str, str]:
    """The variables of every process of a stage, wherever it runs. `seconds`: the stage's `stop_seconds`."""
    return {
        "APERTUS_STOP_SECONDS": f"{seconds:g}",
        # torchrun kills ranks that take longer; 30 by default
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{math.ceil(seconds + END_SECONDS)}",
        "OMP_NUM_THREADS": str(launch.threads),
        "MKL_NUM_THREADS": str(launch.threads),
        # OpenMP threads spin only briefly while they wait. Steps of the miniature with two threads, on two
        # cores, alone and beside another training: 70 and 125 ms with 500, 67 and 165 with 2,000, 58 and 620
        # with 20,000.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "500"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        # torchrun's --signals-to-handle: passed on to the ranks
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "TOKENIZERS_PARALLELISM": "true",
    }


def error_of(scratch: Path, code: int = 0) -> Failure | None:
    """The error that the stage left, if any, or a failure that names the signal that told its processes to
    stop: when they had no time to say so, torchrun does (`TORCHRUN_ERROR`), or the exit code."""
    file = scratch / ERROR
    error = Failure.model_validate_json(file.read_text()) if file.exists() else None
    torchrun = scratch / TORCHRUN_ERROR
    said = re.search(TORCHRUN_SIGNALLED, torchrun.read_text()) if torchrun.exists() else None
    number = -code if -code in STOP_SIGNALS else int(said[1]) if said else 0
    if number and (error is None or error.again):
        return Failure(message=signal.Signals(number).name, interrupted=True)
    return error


def stacks_of(scratch: Path) -> list[str]:
    """The lines of the stacks that hung ranks have written (`apertus_model.trainer.hang`)."""
    lines: list[str] = []
    for file in sorted(scratch.glob("stacks-*.txt")):
        if text := file.read_text(errors="replace").strip():
            lines += [f"stacks of rank {file.stem.removeprefix('stacks-')}:", *text.splitlines()]
    return lines


class GrowingFile:
    """A file that another process appends to, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._rest = ""

    def lines(self, *, last: bool = False) -> list[str]:
        """The whole lines that came since the last call. `last`: nothing is appended any more, so that what
        follows them is a line."""
        if self._path.exists():
            with open(self._path, encoding="utf-8", errors="replace", newline="\n") as file:
                file.seek(self._place)
                self._rest += file.read()
                self._place = file.tell()
        *lines, self._rest = self._rest.split("\n")
        return [*lines, self._rest] if last and self._rest else lines


def lines_of(path: Path, over: threading.Event, seconds: float = 0.2) -> Iterator[str]:
    """Yields the lines of a growing file as they come, until `over` is set."""
    file = GrowingFile(path)
    while not (last := over.is_set()):
        yield from file.lines()
        over.wait(seconds)
    yield from file.lines(last=last)


def follow(path: Path, on_progress: Callable[[ProgressRow], None], over: threading.Event) -> None:
    """Calls back for every row that the stage appends to a file, until `over` is set."""
    for line in lines_of(path, over):
        with contextlib.suppress(ValueError):  # the last line of a process that was killed
            on_progress(ProgressRow.model_validate_json(line))
