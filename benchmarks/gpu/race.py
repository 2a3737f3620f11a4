"""Runs the contenders in turns, each in a process of its own, until all is measured or the time is over.

Invariants: contenders that fit on the GPU together form a group. They are built beside each other and take
rounds in turns, each alone on the GPU. A contender that fails, or that does not answer in time, is a row that
says why, and the others continue. This process never uses the GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.records import Round, Row
from benchmarks.gpu.shapes import Trial
from tools.gpu_check import nvidia_smi

OUT_OF_TIME = "the time was over"
PATIENCE = 180.0  # seconds for an answer: compiling takes most of them
FILLED = 0.92  # of the memory of a GPU; the processes of the group that waits have a context each
ROUNDS = 3  # of a contender in a group
WORK = "benchmarks.gpu.contenders"  # not imported here: it loads torch, and torchao asks the GPU


class Failed(Exception):
    """A contender cannot be measured; the message says why."""


def work(*arguments: Any) -> None:
    """The process of a contender. The type and the first line of an exception are its answer, through the
    connection that is the last argument."""
    try:
        importlib.import_module(WORK).serve(*arguments)
    except Exception as error:
        traceback.print_exc()
        arguments[-1].send(f"{type(error).__name__}: {error}".partition("\n")[0])


class Worker:
    """The process of a contender."""

    def __init__(self, context: Any, *arguments: Any) -> None:
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(*arguments, theirs))
        self._process.start()
        theirs.close()

    def ask(self, request: str) -> None:
        with contextlib.suppress(OSError):  # it has ended; `answer` says why
            self._ours.send(request)

    def answer(self, deadline: float) -> Any:
        """What it answers next. Failed when it fails, ends or hangs, or at the deadline."""
        left = deadline - time.monotonic()
        if not self._ours.poll(max(0.0, min(left, PATIENCE))):
            raise Failed(OUT_OF_TIME if left < PATIENCE else f"it did not answer in {PATIENCE:.0f} seconds")
        try:
            answer = self._ours.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise Failed(f"its process ended with code {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise Failed(answer)
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.join(30)


def context(tiny: bool) -> Any:
    """How processes start. Without a GPU, they are forked from one that has imported everything; a process
    that has asked for a GPU cannot be forked."""
    if not tiny:
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload([WORK])
    return chosen


def groups(trials: list[Trial], memory: float) -> list[list[Trial]]:
    """Trials of a shape that fit into the memory together, with the limit, which is the first of a shape, in
    each group. The groups that hold the most important contenders of each shape come first."""
    of_shapes = []
    for _, (limit, *contenders) in itertools.groupby(trials, key=lambda trial: trial.shape):
        own = [[limit]]
        for trial in contenders:
            if own[-1] != [limit] and sum(part.memory for part in (*own[-1], trial)) > FILLED * memory:
                own.append([limit])
            own[-1].append(trial)
        of_shapes.append(own)
    return [group for rank in itertools.zip_longest(*of_shapes) for group in rank if group]


class Race:
    """The rows of the contenders, and the time in which they are measured.

    `capability`: of the GPU; None without one. `seconds`: until the end.
    """

    def __init__(self, trials: list[Trial], capability: tuple[int, int] | None, seconds: float) -> None:
        self.rows = {
            trial: Row(
                shape=trial.shape.name,
                contender=trial.name,
                parameters=trial.model.parameters,
                why=trial.obstacle(capability),
            )
            for trial in trials
        }
        self._deadline = time.monotonic() + seconds
        self._context = context(capability is None)
        self._threads = 1 if capability is None else 2

    def run(self, memory: float, profile: bool) -> Iterator[None]:
        """Measures the groups, while there is time; yields after each. `memory`: of the GPU, in bytes. While
        a group is measured, the processes of the next one import what they need."""
        measured = [trial for trial, row in self.rows.items() if not row.why]
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as started:

            def start(group: list[Trial]) -> dict[Trial, Worker]:
                workers = {trial: Worker(self._context, trial, self._threads, scratch) for trial in group}
                for worker in workers.values():
                    started.callback(worker.stop)
                return workers

            planned, workers = groups(measured, memory), list[dict[Trial, Worker]]()
            for number in range(len(planned)):
                if time.monotonic() > self._deadline:
                    break
                workers += [start(group) for group in planned[len(workers) : number + 2]]
                self._run_group(number, workers[number], profile)
                yield
        for row in self.rows.values():
            row.why = row.why or ("" if row.rounds else OUT_OF_TIME)

    def _run_group(self, number: int, workers: dict[Trial, Worker], profile: bool) -> None:
        for worker in workers.values():
            worker.ask("build")
        for row, built, _ in self._answers(workers):
            row.first_loss, row.peak_memory = built
        for turn in range(ROUNDS):
            for row, (tokens, seconds), clock in self._answers(workers, "round"):
                part = Round(group=number, number=turn, tokens=tokens, seconds=seconds, clock=clock)
                row.rounds.append(part)
        if profile:
            for row, by_class, _ in self._answers(workers, "profile"):
                row.profile = by_class
        for worker in workers.values():
            worker.stop()

    def _answers(
        self, workers: dict[Trial, Worker], request: str | None = None
    ) -> Iterator[tuple[Row, Any, str]]:
        """(row, answer, clock and power of the GPU meanwhile) of each contender, one after the other. Without
        a request, it has been asked before."""
        for trial, worker in list(workers.items()):
            row = self.rows[trial]
            if request is not None:
                worker.ask(request)
            clock = ", ".join(nvidia_smi("clocks.sm", "power.draw").values())
            try:
                yield row, worker.answer(self._deadline), clock
            except Failed as error:
                if not row.rounds or str(error) != OUT_OF_TIME:
                    row.why = str(error)
                workers.pop(trial).stop()
