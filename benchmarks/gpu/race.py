"""Runs the contenders in turns, each in a process of its own, until all is measured or the time is over.

Invariants: contenders that fit on the GPU together form a group. They are built beside each other and take
rounds in turns, each alone on the GPU. A contender that fails, or that does not answer in time, is a row that
says why, and the others continue. This process never uses the GPU.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.gpu.records import Round, Row
from benchmarks.gpu.shapes import CONTENDERS, LIMIT, Contender, Shape, Task
from tools.gpu_check import nvidia_smi

OUT_OF_TIME = "the time was over"
PATIENCE = 180.0  # seconds for an answer: compiling takes most of them
FILLED = 0.92  # of the memory of a GPU


WORK = "benchmarks.gpu.contenders"  # not imported here: it loads torch, and torchao asks the GPU


class Failed(Exception):
    """A contender cannot be measured; the message says why."""


class Gpu(NamedTuple):
    """The GPU of a machine, as CUDA names it."""

    name: str
    memory: int  # bytes
    capability: tuple[int, int]
    older_torch: bool  # see `benchmarks.gpu.older_torch`


def work(function: str, *arguments: Any) -> None:
    """Calls a function of `WORK`, in a process of its own. The text of an exception is its answer, through
    the connection that is the last argument."""
    try:
        getattr(importlib.import_module(WORK), function)(*arguments)
    except Exception as error:
        arguments[-1].send(f"{type(error).__name__}: {error}".splitlines()[0])


class Worker:
    """The process of a contender."""

    def __init__(self, context: Any, function: str, *arguments: Any) -> None:
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(function, *arguments, theirs))
        self._process.start()
        theirs.close()

    def answer(self, deadline: float) -> Any:
        """What it answers next. Failed when it fails, ends or hangs, or at the deadline."""
        left = deadline - time.monotonic()
        if not self._ours.poll(max(0.0, min(left, PATIENCE))):
            raise Failed(OUT_OF_TIME if left < PATIENCE else f"it did not answer in {PATIENCE:.0f} seconds")
        try:
            answer = self._ours.recv()
        except EOFError:
            self._process.join(5)
            raise Failed(f"its process ended with code {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise Failed(answer)
        return answer

    def ask(self, request: Any) -> None:
        try:
            self._ours.send(request)
        except OSError:
            raise Failed(f"its process ended with code {self._process.exitcode}") from None

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def context(tiny: bool) -> Any:
    """How processes start. Without a GPU, they are forked from one that has imported everything; a process
    that has asked for a GPU cannot be forked."""
    if not tiny:
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload([WORK])
    return chosen


def gpu() -> Gpu | None:
    """The first GPU, asked in a process of its own."""
    worker = Worker(multiprocessing.get_context("spawn"), "facts")
    try:
        answer = worker.answer(time.monotonic() + 120)
    finally:
        worker.stop()
    return answer and Gpu(*answer)


def tasks_of(shapes: list[Shape], capability: tuple[int, int] | None) -> tuple[list[Task], dict[Task, str]]:
    """What is measured, the most important first; and what is not, with the reason."""
    limit = Contender(LIMIT, "limit")
    tasks = [Task(shape, contender) for shape in shapes for contender in (limit, *CONTENDERS)]
    left_out = {}
    for task in tasks:
        if task.contender.compiled and capability is None:
            left_out[task] = "compiled layers are compared on a GPU"
        elif task.contender.float8 and capability is not None and capability < (8, 9):
            left_out[task] = "this GPU has no float8"
    return tasks, left_out


def groups(tasks: list[Task], memory: float) -> list[list[Task]]:
    """Tasks of a shape that fit into the memory together, with the limit in each group. The groups that hold
    the most important contenders of each shape come first."""
    by_shape: dict[str, list[list[Task]]] = {}
    limits = {task.shape.name: task for task in tasks if task.contender.name == LIMIT}
    for task in tasks:
        if task is limits.get(task.shape.name):
            continue
        limit, own = limits[task.shape.name], by_shape.setdefault(task.shape.name, [])
        if not own or sum(part.memory for part in own[-1]) + task.memory > FILLED * memory:
            own.append([limit])
        own[-1].append(task)
    ranks = max(map(len, by_shape.values()))
    return [own[rank] for rank in range(ranks) for own in by_shape.values() if rank < len(own)]


class Race:
    """The rows of the contenders, and the time in which they are measured."""

    def __init__(self, tasks: list[Task], left_out: dict[Task, str], seconds: float, tiny: bool) -> None:
        self.rows = {
            task: Row(
                shape=task.shape.name,
                contender=task.contender.name,
                parameters=task.model.parameters,
                tokens_per_step=task.shape.tokens,
                why=left_out.get(task, ""),
            )
            for task in tasks
        }
        self._left = [task for task in tasks if task not in left_out]
        self._deadline = time.monotonic() + seconds
        self._context = context(tiny)
        self._threads = 1 if tiny else 2

    def run(self, memory: float, rounds: int, passes: int, profile: bool) -> None:
        """Measures all groups, `passes` times while there is time."""
        planned = groups(self._left, memory) * passes
        for number, group in enumerate(planned):
            if time.monotonic() < self._deadline:
                self._run_group(number, group, rounds, profile)
        for task in self._left:
            row = self.rows[task]
            row.why = row.why or ("" if row.rounds else OUT_OF_TIME)

    def _run_group(self, number: int, group: list[Task], rounds: int, profile: bool) -> None:
        waiting = {
            task: Worker(self._context, "serve", task, self._threads)
            for task in group
            if not self.rows[task].why
        }
        try:
            for task, answer, _ in self._answers(waiting):
                self.rows[task] = self.rows[task].model_copy(update=answer)
            for turn in range(rounds):
                for task, (tokens, seconds), clock in self._answers(waiting, lambda task: task.shape.steps):
                    part = Round(group=number, number=turn, tokens=tokens, seconds=seconds, clock=clock)
                    self.rows[task].rounds.append(part)
            if profile:
                for task, answer, _ in self._answers(waiting, lambda task: "profile"):
                    self.rows[task].profile = answer
        finally:
            for worker in waiting.values():
                worker.stop()

    def _answers(
        self, workers: dict[Task, Worker], request: Callable[[Task], Any] | None = None
    ) -> Iterator[tuple[Task, Any, str]]:
        """(task, answer, clock of the GPU meanwhile) of each contender, one after the other. Without a
        request, the answers that say that they are ready."""
        for task, worker in list(workers.items()):
            clock = ""
            try:
                if request is not None:
                    worker.ask(request(task))
                    clock = ", ".join(nvidia_smi("clocks.sm", "power.draw").values())
                answer = worker.answer(self._deadline)
            except Failed as error:
                self._end(task, workers, error)
            else:
                yield task, answer, clock

    def _end(self, task: Task, workers: dict[Task, Worker], error: Failed) -> None:
        if not self.rows[task].rounds or str(error) != OUT_OF_TIME:
            self.rows[task].why = str(error)
        workers.pop(task).stop()
