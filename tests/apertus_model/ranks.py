"""Functions run in several processes that form a process group.

`in_processes` forks processes for one function. `in_kept_processes` keeps them: what torch computes once per
process, as how operators of DTensors are sharded, then serves all trainings of the tests.
"""

import atexit
import faulthandler
import gc
import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

RUN_SECONDS = 120.0

_CONTEXT = multiprocessing.get_context("fork")


def in_processes(
    folder: Path, work: Callable[[int], Any], processes: int, seconds: float = RUN_SECONDS
) -> list[Any]:
    """The results of `work(rank)` in forked processes; the first error in time is raised here, or that there
    is no result after `seconds`. A process ends after all have their results: its end closes connections that
    others read."""
    all_done = _CONTEXT.Barrier(processes)
    port = _free_port()
    answers = _answers(folder, processes)

    def child(rank: int) -> None:
        _answer(work, rank, processes, port, answers[rank], all_done, seconds)
        os._exit(0)

    children = _fork(child, processes)
    for process in children:
        process.join(seconds)
    _kill(children)
    return _results(answers, seconds)


class _KeptProcesses:
    """Processes, one per rank, that do what they are sent until one fails."""

    def __init__(self, processes: int) -> None:
        self._connections = [_CONTEXT.Pipe() for _ in range(processes)]
        self._all_done = _CONTEXT.Barrier(processes)
        self._port = _free_port()
        self._parent = os.getpid()
        self._children = _fork(self._serve, processes)

    def _serve(self, rank: int) -> None:
        _keep_process_groups()
        gc.freeze()
        here: Connection = self._connections[rank][1]
        environment = dict(os.environ)
        while True:
            while not here.poll(1):
                if os.getppid() != self._parent:
                    os._exit(0)
            work, answer, seconds = cloudpickle.loads(here.recv_bytes())
            os.environ.clear()
            os.environ.update(environment)
            torch.manual_seed(0)
            torch.compiler.reset()
            ok = _answer(work, rank, len(self._connections), self._port, answer, self._all_done, seconds)
            if not ok:
                os._exit(0)
            del work
            gc.collect()
            here.send(True)

    def run(self, work: Callable[[int], Any], answers: list[Path], seconds: float) -> bool:
        """Whether all processes have done it in that time."""
        for (there, _), answer in zip(self._connections, answers, strict=True):
            there.send_bytes(cloudpickle.dumps((work, answer, seconds)))
        end = time.monotonic() + seconds
        waiting = {there for there, _ in self._connections}
        while waiting and time.monotonic() < end and all(child.is_alive() for child in self._children):
            for there in multiprocessing.connection.wait(waiting, 0.1):
                there.recv()
                waiting.remove(there)
        return not waiting

    def end(self) -> None:
        _kill(self._children)


_kept: dict[int, _KeptProcesses] = {}
patched = False  # whether the test patches this process, which those that are kept do not see


@atexit.register
def end_kept_processes() -> None:
    for kept in _kept.values():
        kept.end()
    _kept.clear()


def in_kept_processes(
    folder: Path, work: Callable[[int], Any], processes: int, seconds: float = RUN_SECONDS
) -> list[Any]:
    """As `in_processes`, in processes that earlier tests may have used, unless the test patches this one;
    `work` is pickled."""
    if patched:
        return in_processes(folder, work, processes, seconds)
    answers = _answers(folder, processes)
    if processes not in _kept:
        _kept[processes] = _KeptProcesses(processes)
    if not _kept[processes].run(work, answers, seconds):
        _kept.pop(processes).end()
    return _results(answers, seconds)


def _keep_process_groups() -> None:
    """Groups of this process are made once and never destroyed: what torch keeps of shardings names them, and
    each has threads."""
    make, made = dist.new_group, dict[Any, Any]()

    def new_group(ranks: list[int] | None = None, **options: Any) -> Any:
        key = tuple(ranks or ()), options.get("backend"), options.get("group_desc")
        if key not in made:
            made[key] = make(ranks, **options)
        return made[key]

    dist.destroy_process_group = lambda *_: None
    dist.new_group = device_mesh.new_group = new_group


def _fork(child: Callable[[int], None], processes: int) -> list[Any]:
    # a child that sets it anew would wait for pytest's thread, which a fork does not copy
    faulthandler.cancel_dump_traceback_later()
    children = [_CONTEXT.Process(target=child, args=(rank,)) for rank in range(processes)]
    for process in children:
        process.start()
    return children


def _answer(
    work: Callable[[int], Any],
    rank: int,
    processes: int,
    port: int,
    answer: Path,
    all_done: Any,
    seconds: float,
) -> bool:
    """Writes what `work(rank)` returns or raises into a file; whether it and all others returned."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        torch.save({"result": work(rank)}, answer)
        all_done.wait(seconds)
        return True
    except threading.BrokenBarrierError:  # another process failed
        pass
    except BaseException:
        torch.save({"error": traceback.format_exc(), "at": time.time()}, answer)
        all_done.abort()
    return False


def _answers(folder: Path, processes: int) -> list[Path]:
    """Files for what each process returns; those of an earlier run are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = [folder / f"answer-{rank}.pt" for rank in range(processes)]
    for answer in answers:
        answer.unlink(missing_ok=True)
    return answers


def _results(answers: list[Path], seconds: float) -> list[Any]:
    loaded = [torch.load(answer, weights_only=False) for answer in answers if answer.exists()]
    if errors := [answer for answer in loaded if "error" in answer]:
        raise RuntimeError(min(errors, key=lambda answer: answer["at"])["error"])
    missing = [answer.name for answer in answers if not answer.exists()]
    assert not missing, f"no answer after {seconds} s: {', '.join(missing)}"
    return [answer["result"] for answer in loaded]


def _kill(children: list[Any]) -> None:
    for process in children:
        if process.is_alive():
            process.kill()
        process.join()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
