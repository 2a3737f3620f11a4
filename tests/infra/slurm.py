"""A real Slurm on this machine, for tests: one controller and one node, on the loopback only.

It wants root, for munge and slurmd, and slurmd wants cgroups. Tests that ask for it where it is not
installed, or cannot run, are skipped with the reason.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("sbatch", "squeue", "scancel", "slurmctld", "slurmd", "munged")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
UP_SECONDS = 60.0
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SrunPortRange=60001-60900
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
MpiDefault=none
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=4000
PartitionName=tests Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class LittleSlurm:
    """`environment` makes sbatch and its like use it; one partition, `tests`."""

    folder: Path
    environment: dict[str, str]

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        return subprocess.run(
            command, env=os.environ | self.environment, check=True, capture_output=True, text=True, timeout=30
        ).stdout


@contextlib.contextmanager
def little_slurm(folder: Path, cpus: int = 2, *, alone: bool = False) -> Iterator[LittleSlurm]:
    """Starts munged, slurmctld and slurmd below a folder and ends them; skips the test if they cannot run.
    `alone`: what jobs start sees no process of this machine but those of jobs."""
    if os.geteuid() != 0:
        pytest.skip("munged and slurmd are started as root only")
    if absent := [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]:
        pytest.skip(f"no {', '.join(absent)}: apt-get install --no-install-recommends {' '.join(PACKAGES)}")
    folder.mkdir()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    text = CONFIGURATION.format(
        host=socket.gethostname().split(".")[0], folder=folder, cpus=cpus, controller=_port(), node=_port()
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(text)
    slurm = LittleSlurm(folder, {"SLURM_CONF": str(configuration), "PATH": _path()})
    environment = os.environ | slurm.environment
    munge = [
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munge.pid",
        f"--seed-file={folder}/munge.seed",
    ]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--log-file={folder}/munge.log", *munge],
        ["slurmctld", "-D", "-f", str(configuration)],
        [*(ALONE if alone else ()), "slurmd", "-D", "-f", str(configuration), "-N", "localhost"],
    ]
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for command in commands:
            name = next(word for word in command if word in PROGRAMS)
            with open(folder / f"{name}.out", "wb") as out:
                streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                daemons[name] = subprocess.Popen(command, **streams, env=environment)
            if name == "munged":
                _wait_for(lambda: (folder / "munge.socket").exists(), daemons, folder)
        _wait_for(lambda: _node_state(environment) == "idle", daemons, folder)
        yield slurm
    finally:
        for daemon in reversed(daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        _end_steps(configuration)


def _end_steps(configuration: Path) -> None:
    """Ends what slurmd started: tasks and their slurmstepd outlive it, by design, and have our
    configuration in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                f"SLURM_CONF={configuration}\0".encode() in (process / "environ").read_bytes()
                and int(process.name) != os.getpid()
            ):
                os.kill(int(process.name), signal.SIGKILL)


def _node_state(environment: dict[str, str]) -> str:
    asked = subprocess.run(
        ["sinfo", "--noheader", "--format=%t"], env=environment, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


def _wait_for(ready: Callable[[], bool], daemons: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    end = time.monotonic() + UP_SECONDS
    while not ready():
        for name, daemon in daemons.items():
            if daemon.poll() is not None:
                output = (folder / f"{name}.out").read_text(errors="replace").splitlines()
                pytest.skip(f"{name} does not run on this machine: {'; '.join(output[-3:])}")
        if time.monotonic() > end:
            logs = sorted(folder.glob("*.[lo][ou][gt]"))
            texts = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs]
            raise TimeoutError("\n".join([f"no Slurm after {UP_SECONDS:g} s", *texts]))
        time.sleep(0.1)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
