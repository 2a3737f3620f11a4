"""A real Slurm on this machine, for tests: one controller and one node on the loopback only, or nodes with
networks of their own.

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

from tests.e2e.nodes import Nodes

PROGRAMS = ("sbatch", "squeue", "scancel", "slurmctld", "slurmd", "munged")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
UP_SECONDS = 60.0
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}({address})
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
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
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
{nodes}
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} CPUs={cpus} RealMemory=4000"


@dataclass(frozen=True)
class LittleSlurm:
    """`environment` makes sbatch and its like use it, where the words `on` go before them; one partition,
    `tests`."""

    folder: Path
    environment: dict[str, str]
    on: list[str]

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        return subprocess.run(
            [*self.on, *command],
            env=os.environ | self.environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout


@contextlib.contextmanager
def little_slurm(
    folder: Path, cpus: int = 2, *, alone: bool = False, nodes: Nodes | None = None
) -> Iterator[LittleSlurm]:
    """Starts munged, slurmctld and slurmd below a folder and ends them; skips the test if they cannot run.

    Args:
        alone: what jobs start sees no process of this machine but those of jobs on the same node.
        nodes: its nodes; the controller is on the first.
    """
    if os.geteuid() != 0:
        pytest.skip("munged and slurmd are started as root only")
    if absent := [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]:
        pytest.skip(f"no {', '.join(absent)}: apt-get install --no-install-recommends {' '.join(PACKAGES)}")
    folder.mkdir()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    here = socket.gethostname().split(".")[0]
    hosts, on = {"localhost": (here, "127.0.0.1")}, {"localhost": list[str]()}
    if nodes is not None:
        hosts = {f"node{number}": (f"node{number}", f"10.77.0.{number}") for number in nodes.numbers}
        on = {f"node{number}": nodes.on(number) for number in nodes.numbers}
    (host, address), *_ = hosts.values()
    first = next(iter(on.values()))
    listed = (NODE.format(name=name, host=at[0], address=at[1], cpus=cpus) for name, at in hosts.items())
    text = CONFIGURATION.format(
        host=host,
        address=address,
        folder=folder,
        nodes="\n".join(listed),
        controller=_port(),
        node=_port(),
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(text)
    slurm = LittleSlurm(folder, {"SLURM_CONF": str(configuration), "PATH": _path()}, first)
    environment = os.environ | slurm.environment
    munge = [
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munge.pid",
        f"--seed-file={folder}/munge.seed",
    ]
    commands = {
        "munged": [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--log-file={folder}/munge.log",
            *munge,
        ],
        "slurmctld": [*first, "slurmctld", "-D", "-f", str(configuration)],
    }
    for name, words in on.items():
        slurmd = ["slurmd", "-D", "-f", str(configuration), "-N", name]
        commands[f"slurmd-{name}"] = [*words, *(ALONE if alone else ()), *slurmd]
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with open(folder / f"{name}.out", "wb") as out:
                streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                daemons[name] = subprocess.Popen(command, **streams, env=environment)
            if name == "munged":
                _wait_for(lambda: (folder / "munge.socket").exists(), daemons, folder)
        _wait_for(lambda: _states(slurm) == "idle", daemons, folder)
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


def _states(slurm: LittleSlurm) -> str:
    """The states of the nodes, each once; nothing before the controller answers."""
    asked = [*slurm.on, "sinfo", "--noheader", "--format=%t"]
    environment = os.environ | slurm.environment
    return subprocess.run(asked, env=environment, capture_output=True, text=True, check=False).stdout.strip()


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
